// Several answers to each message, side by side: with other temperatures and seeds, or from other servers.
//
// The page may talk to another server only if its own address names it (`?server=`): the policy it came with is made from
// that. So adding a server loads the page again.

import { byId, el, iconButton } from "../common/dom.js";
import { preferences } from "./store.js";

const ORIGIN = /^https?:\/\/(?:[A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\])(?::\d{1,5})?$/;
const MOST = 6;

export const servers = () => preferences.get("servers", []).filter((server) => ORIGIN.test(server));

/** Whether the page's address names the servers that were added; if not it is loaded again, with them. */
export function allowServers() {
  const wanted = servers();
  const url = new URL(location.href);
  const named = url.searchParams.getAll("server");
  if (wanted.length === named.length && wanted.every((server) => named.includes(server))) return true;
  url.searchParams.delete("server");
  for (const server of wanted) url.searchParams.append("server", server);
  location.replace(url);
  return false;
}

export class Lanes {
  constructor(chat) {
    this.chat = chat;
    this.dialog = byId("lanes-dialog");
    byId("lanes").addEventListener("click", () => this.open());
    byId("add-lane").addEventListener("click", () => {
      const temperatures = [0, 0.7, 1, 1.3, 0.3, 1.6];
      this.given.push({ temperature: temperatures[this.given.length] });
      this.draw();
    });
    byId("lanes-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.chat.setLanes(this.given.map(cleanLane));
      this.dialog.close();
    });
    byId("add-server").addEventListener("click", () => this.addServer());
    chat.addEventListener("lanes", () => this.tell());
    this.tell();
  }

  tell() {
    const count = this.chat.lanes.length;
    byId("lanes-count").textContent = count > 1 ? String(count) : "";
    byId("lanes").setAttribute("aria-label", count > 1 ? `${count} answers side by side` : "Answers side by side");
  }

  open() {
    this.given = this.chat.lanes.map((lane) => ({ ...lane }));
    byId("server-problem").textContent = "";
    this.draw();
    this.dialog.showModal();
  }

  draw() {
    byId("lane-rows").replaceChildren(...this.given.map((lane, index) => this.row(lane, index)));
    byId("add-lane").disabled = this.given.length >= MOST;
    byId("server-list").replaceChildren(...servers().map((server) => el("li", {}, el("code", { text: server }), iconButton("trash", `Remove ${server}`, () => this.removeServer(server)))));
  }

  row(lane, index) {
    const id = (name) => `lane-${index}-${name}`;
    const field = (name, label, input) => {
      input.addEventListener("change", () => (lane[name] = input.value));
      return el("div", {}, el("label", { for: id(name), class: "small", text: label }), input);
    };
    const choices = [el("option", { value: "", text: "this server" }), ...servers().map((server) => el("option", { value: server, text: server }))];
    const server = el("select", { id: id("server") }, ...choices);
    server.value = lane.server ?? "";
    const numeric = (name, step) => el("input", { type: "number", id: id(name), step, min: 0, max: name === "temperature" ? 2 : null, placeholder: "as set", value: lane[name] ?? "" });
    const remove = () => {
      this.given.splice(index, 1);
      this.draw();
      byId("add-lane").focus();
    };
    return el(
      "fieldset",
      {},
      el("legend", { text: `Answer ${index + 1}` }),
      field("server", "Server", server),
      field("temperature", "Temperature", numeric("temperature", 0.1)),
      field("seed", "Seed", numeric("seed", 1)),
      iconButton("trash", `Remove answer ${index + 1}`, remove, { disabled: this.given.length === 1 }),
    );
  }

  addServer() {
    const input = byId("server-url");
    const url = input.value.trim().replace(/\/+$/, "");
    if (!ORIGIN.test(url)) {
      byId("server-problem").textContent = "Needed: http:// or https://, a name, and a port if there is one. Nothing behind it.";
      input.focus();
      return;
    }
    preferences.set("lanes", [...this.given.map(cleanLane), { server: url }].slice(0, MOST));
    preferences.set("servers", [...new Set([...servers(), url])]);
    allowServers();
  }

  removeServer(server) {
    preferences.set("servers", servers().filter((other) => other !== server));
    const left = this.given.map(cleanLane).filter((lane) => lane.server !== server);
    preferences.set("lanes", left.length ? left : [{}]);
    allowServers();
  }
}

function cleanLane(lane) {
  const clean = {};
  if (lane.server) clean.server = lane.server;
  for (const name of ["temperature", "seed"]) if (lane[name] !== undefined && lane[name] !== "") clean[name] = Number(lane[name]);
  return clean;
}
