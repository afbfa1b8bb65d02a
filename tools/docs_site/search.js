// Searches all pages for words, in the browser; the index is loaded when it is first wanted. And the button of the theme.

const field = document.getElementById("search");
const list = document.getElementById("found");
const number = document.getElementById("number");
const THEMES = ["auto", "light", "dark"];
const MOST = 12;
const AROUND = 60;

function load() {
  if (window.searchIndex || document.getElementById("index")) return;
  const script = document.createElement("script");
  script.id = "index";
  script.src = "search-index.js";
  script.addEventListener("load", search);
  document.head.append(script);
}

function score(entry, words) {
  const text = entry.words.toLowerCase();
  let sum = 0;
  for (const word of words) {
    const inText = text.split(word).length - 1;
    const heads = entry.heads.filter(([, , head]) => head.toLowerCase().includes(word)).length;
    if (!inText && !heads) return 0;
    sum += Math.min(inText, 10) + 20 * heads + (entry.title.toLowerCase().includes(word) ? 60 : 0);
  }
  return sum;
}

function show(entry, words) {
  const head = entry.heads.find(([level, , text]) => level > 1 && words.every((word) => text.toLowerCase().includes(word)));
  const item = document.createElement("li");
  const link = document.createElement("a");
  link.href = head ? `${entry.page}#${head[1]}` : entry.page;
  link.textContent = head ? `${entry.title}: ${head[2]}` : entry.title;
  const place = Math.max(0, entry.words.toLowerCase().indexOf(words[0]) - AROUND);
  const part = document.createElement("span");
  part.textContent = `${place ? "…" : ""}${entry.words.slice(place, place + 2 * AROUND)}…`;
  item.append(link, part);
  return item;
}

function search() {
  const words = field.value.toLowerCase().split(/\s+/).filter((word) => word.length > 1);
  const index = window.searchIndex ?? [];
  const found = words.length ? index.map((entry) => [score(entry, words), entry]).filter(([sum]) => sum).sort((a, b) => b[0] - a[0]) : [];
  list.replaceChildren(...found.slice(0, MOST).map(([, entry]) => show(entry, words)));
  list.hidden = !found.length;
  number.textContent = words.length ? `${found.length} pages found` : "";
}

field.addEventListener("focus", load);
field.addEventListener("input", search);
document.addEventListener("keydown", (event) => {
  if (event.key === "/" && !event.target.matches("input, textarea")) {
    event.preventDefault();
    field.focus();
  }
  if (event.key === "Escape") list.hidden = true;
});

const button = document.getElementById("theme");
const say = () => (button.textContent = `Theme: ${window.theme.get()}`);
button.addEventListener("click", () => {
  window.theme.set(THEMES[(THEMES.indexOf(window.theme.get()) + 1) % THEMES.length]);
  say();
});
say();
if (matchMedia("(max-width: 60rem)").matches) document.getElementById("pages").open = false;
