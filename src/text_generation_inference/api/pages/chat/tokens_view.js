// An answer token by token: coloured by probability, and for each what the model might have said instead.

import { el } from "../common/dom.js";

const BOUNDS = [0.9, 0.6, 0.35, 0.15, 0.05]; // probabilities between the colours, the likeliest first
const VISIBLE = { "\n": "↵\n", "\t": "⇥" };

const percent = (logprob) => {
  const share = Math.exp(logprob) * 100;
  return share >= 99.95 ? "100%" : share >= 0.1 ? `${share.toFixed(1)}%` : "<0.1%";
};
const shown = (text) => JSON.stringify(text).slice(1, -1).replaceAll('\\"', '"') || "(nothing)";

/** The tokens; `fork(index, text)` goes on from there with another token, where that is possible. */
export function tokensNode(tokens, fork) {
  const node = el("div", { class: "tokens" });
  const list = el("div", { class: "token-text", role: "group", "aria-label": "Tokens. Arrow keys go from one to the next, Enter shows alternatives." });
  tokens.forEach((token, index) => {
    const level = BOUNDS.findIndex((bound) => Math.exp(token.logprob) >= bound);
    const text = token.text.replace(/[\n\t]/g, (space) => VISIBLE[space]);
    list.append(
      el("span", { class: `token p${level < 0 ? BOUNDS.length : level}`, role: "button", tabindex: index ? -1 : 0, "data-index": index, "aria-label": `${shown(token.text)}, ${percent(token.logprob)}`, text }),
    );
  });
  const detail = el("div", { class: "token-detail", hidden: true });
  const open = (span) => {
    list.querySelector(".open")?.classList.remove("open");
    span.classList.add("open");
    const index = Number(span.dataset.index);
    detail.replaceChildren(...details(tokens[index], fork && ((text) => fork(index, text))));
    detail.hidden = false;
  };
  list.addEventListener("click", (event) => event.target.matches(".token") && open(event.target));
  list.addEventListener("keydown", (event) => move(event, open));
  node.append(legend(), list, detail);
  return node;
}

function move(event, open) {
  const span = event.target;
  const to = { ArrowRight: span.nextElementSibling, ArrowLeft: span.previousElementSibling, Home: span.parentElement.firstElementChild, End: span.parentElement.lastElementChild }[event.key];
  if (event.key === "Enter" || event.key === " ") open(span);
  else if (to) {
    span.tabIndex = -1;
    to.tabIndex = 0;
    to.focus();
  } else return;
  event.preventDefault();
}

function legend() {
  const names = ["90% or more", "60%", "35%", "15%", "5%", "less"];
  return el("p", { class: "legend small soft" }, "Probability: ", names.map((name, level) => el("span", { class: `token p${level}`, text: name })));
}

function details(token, fork) {
  const others = token.top.length ? token.top : [[token.text, token.logprob]];
  const isChosen = ([text]) => text === token.text;
  const rows = others.some(isChosen) ? others : [[token.text, token.logprob], ...others];
  return rows.map((row) => {
    const [text, logprob] = row;
    const bar = el("span", { class: "bar" });
    bar.style.setProperty("--share", `${(Math.exp(logprob) * 100).toFixed(2)}%`);
    const label = el("code", { text: shown(text) });
    const name = fork && !isChosen(row) && !text.includes("\ufffd") ? el("button", { type: "button", class: "plain", title: "Go on from here with this token", "aria-label": `Go on from here with ${shown(text)}`, on: { click: () => fork(text) } }, label) : label;
    return el("div", { class: isChosen(row) ? "chosen" : null }, name, bar, el("span", { class: "share", text: percent(logprob) }));
  });
}
