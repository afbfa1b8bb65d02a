// The panel of settings: the system prompt, and every setting with what the server says it means.

import { byId, el } from "../common/dom.js";
import { getDocument } from "./api.js";
import { FIELDS, GROUPS, valueOf } from "./settings_table.js";

export class SettingsPanel {
  constructor(chat) {
    this.chat = chat;
    this.inputs = new Map();
    byId("system").addEventListener("change", (event) => chat.setSystem(event.target.value));
    byId("reset").addEventListener("click", () => this.reset());
    for (const event of ["open", "settings"]) chat.addEventListener(event, () => this.fill());
  }

  /** Made when first looked at, with the words of the API document. */
  async prepare() {
    if (this.made) return;
    this.made = true;
    byId("setting-groups").replaceChildren(...GROUPS.map((group, index) => this.group(group, index === 0)));
    this.fill();
    try {
      const { components } = await getDocument();
      this.explain(components.schemas.ChatRequest.properties);
    } catch {
      this.made = false; // with the words, the next time
    }
  }

  group({ title, fields }, open) {
    return el("details", { class: "group", open }, el("summary", { text: title }), ...fields.map((field) => this.field(field)));
  }

  field(field) {
    const id = `set-${field.name}`;
    const input = this.input(field, id);
    const problem = el("p", { class: "problem small", id: `${id}-problem`, role: "status" });
    const words = el("p", { class: "words small soft", id: `${id}-words` }, el("span", { class: "meaning" }), field.hint ? ` ${field.hint}` : "");
    input.setAttribute("aria-describedby", `${id}-words ${id}-problem`);
    const change = (value) => {
      this.chat.setSetting(field.name, value);
      this.check(field, input, problem, value);
    };
    input.addEventListener("change", () => change(field.kind === "check" ? input.checked : input.value));
    const slider = field.slider ? el("input", { type: "range", "aria-label": `${field.name}, slider`, step: field.step }) : null;
    slider?.addEventListener("input", () => {
      input.value = slider.value;
      input.dispatchEvent(new Event("change"));
    });
    this.inputs.set(field.name, { field, input, slider, problem });
    const label = el("label", { for: id }, el("code", { text: field.name }));
    return el("div", { class: `field ${field.kind === "check" ? "check" : ""}` }, label, slider ? el("div", { class: "slid" }, slider, input) : input, words, problem);
  }

  input({ kind, step, rows }, id) {
    if (kind === "check") return el("input", { type: "checkbox", id });
    if (Array.isArray(kind)) return el("select", { id }, el("option", { value: "", text: "the server's default" }), ...kind.map((choice) => el("option", { value: choice, text: choice })));
    if (kind === "lines" || kind === "json") return el("textarea", { id, rows: rows ?? 2, spellcheck: "false", class: "code-input" });
    const numeric = kind === "number" || kind === "integer";
    return el("input", { type: numeric ? "number" : "text", step: numeric ? (step ?? 1) : null, id, placeholder: "default", autocomplete: "off" });
  }

  explain(properties) {
    for (const { field, input, slider } of this.inputs.values()) {
      const schema = properties[field.name] ?? {};
      const range = [schema, ...(schema.anyOf ?? [])].find((part) => part.minimum !== undefined || part.exclusiveMinimum !== undefined || part.maximum !== undefined) ?? {};
      const above = range.exclusiveMinimum !== undefined && range.exclusiveMinimum !== false;
      const low = range.minimum ?? range.exclusiveMinimum;
      input.closest(".field").querySelector(".meaning").textContent = `${schema.description ?? ""}${limits(low, above, range.maximum)}`;
      if (input.type !== "number") continue;
      if (low !== undefined) input.min = low;
      if (range.maximum !== undefined) input.max = range.maximum;
      if (slider) {
        slider.min = above ? low + field.step : low;
        slider.max = range.maximum;
        slider.value = input.value || field.usual;
      }
    }
  }

  check(field, input, problem, value) {
    let text = "";
    try {
      valueOf(field, value);
      if (input.validity && !input.validity.valid && !input.validity.stepMismatch) text = input.validationMessage;
    } catch (error) {
      text = error.message;
    }
    problem.textContent = text;
    input.setAttribute("aria-invalid", String(Boolean(text)));
    input.closest(".field").classList.toggle("set", value !== "" && value !== false && value !== undefined);
    const slider = this.inputs.get(field.name).slider;
    if (slider) slider.value = value === "" || value === undefined ? field.usual : value;
    this.tellCount();
  }

  fill() {
    const { settings, system } = this.chat.conversation;
    byId("system").value = system;
    for (const { field, input, problem } of this.inputs.values()) {
      const value = settings[field.name];
      if (field.kind === "check") input.checked = Boolean(value);
      else input.value = value ?? "";
      this.check(field, input, problem, value);
    }
    this.tellCount();
  }

  reset() {
    for (const { name } of FIELDS) this.chat.setSetting(name, "");
    this.fill();
  }

  tellCount() {
    const count = Object.keys(this.chat.conversation.settings).length;
    byId("settings-count").textContent = count ? String(count) : "";
    byId("reset").disabled = !count;
  }
}

function limits(low, above, maximum) {
  const from = low === undefined ? "" : `${above ? "above" : "from"} ${low}`;
  const to = maximum !== undefined && maximum < 2 ** 31 - 1 ? `up to ${maximum}` : "";
  const told = [from, to].filter(Boolean).join(", ");
  return told ? ` (${told})` : "";
}
