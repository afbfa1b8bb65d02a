// Markdown inside a line: text to a tree of plain objects. Never HTML: tags in a text are text.
//
// Costs are linear in the text: what a model writes is not trusted to be short or well-formed.

const PUNCTUATION = /[!-/:-@[-`{-~\p{P}\p{S}]/u;
const SPECIAL = /[\\`*_~[\]!<$\n]|https?:\/\//g;
const URL_AT = /https?:\/\/[^\s<>"'`]+/y;
const ANGLE = /<((?:https?:\/\/|mailto:)[^\s<>]+)>/y;
const TARGET = /\(\s*(?:<([^<>\n]*)>|((?:[^\s()\\]|\\.|\((?:[^\s()\\]|\\.)*\))*))(?:\s+(?:"[^"]*"|'[^']*'|\([^()]*\)))?\s*\)/y;

/** Only what leads somewhere harmless when it is clicked; "" for everything else. */
export function safeUrl(url) {
  let parsed;
  try {
    parsed = new URL(url.trim());
  } catch {
    return "";
  }
  return ["http:", "https:", "mailto:"].includes(parsed.protocol) ? parsed.href : "";
}

/** Pictures that are in the text itself. Others are links: loading one would tell a host what was said. */
export function pictureData(url) {
  return /^data:image\/(png|jpeg|gif|webp);base64,[A-Za-z0-9+/=\s]+$/.test(url) ? url : "";
}

export function parseInline(text) {
  return new Scanner(text).run();
}

class Scanner {
  constructor(text) {
    this.text = text;
    this.at = 0;
    this.nodes = []; // of the whole text, flat; delimiters are resolved at the end
    this.brackets = []; // places in `nodes` of [ and ![ that may begin a link
    this.codeRuns = null; // where runs of backticks are, by length
    this.noMath = new Set(); // marks of formulas that have no end from here on
  }

  run() {
    const { text } = this;
    while (this.at < text.length) {
      SPECIAL.lastIndex = this.at;
      const found = SPECIAL.exec(text);
      const stop = found ? found.index : text.length;
      if (stop > this.at) this.push(text.slice(this.at, stop));
      this.at = stop;
      if (found) this.special(found[0]);
    }
    return pair(this.nodes);
  }

  push(text) {
    const last = this.nodes.at(-1);
    if (last?.type === "text") last.text += text;
    else this.nodes.push({ type: "text", text });
  }

  special(mark) {
    const { text, at } = this;
    switch (mark) {
      case "\\":
        return this.escape();
      case "`":
        return this.code();
      case "*":
      case "_":
      case "~":
        return this.delimiter(mark);
      case "!":
        if (text[at + 1] === "[") return this.openBracket(2);
        break;
      case "[":
        return this.openBracket(1);
      case "]":
        return this.closeBracket();
      case "$":
        return this.dollars();
      case "<": {
        ANGLE.lastIndex = at;
        const found = ANGLE.exec(text);
        if (found) return this.link(found[1], [{ type: "text", text: found[1].replace(/^mailto:/, "") }], found[0].length);
        break;
      }
      case "\n":
        this.nodes.push({ type: "break" });
        this.at += 1;
        return;
      default:
        return this.bareUrl();
    }
    this.push(mark);
    this.at += mark.length;
  }

  escape() {
    const next = this.text[this.at + 1];
    if (next === "(") {
      const end = this.mathEnd("\\)", this.at + 2);
      if (end >= 0) return this.math(this.at + 2, end, 2, false);
    }
    if (next === "\n") this.nodes.push({ type: "break" });
    else if (next !== undefined && PUNCTUATION.test(next)) this.push(next);
    else {
      this.push("\\");
      this.at += 1;
      return;
    }
    this.at += 2;
  }

  code() {
    const { text, at } = this;
    if (!this.codeRuns) {
      this.codeRuns = new Map();
      for (const run of text.matchAll(/`+/g)) {
        const places = this.codeRuns.get(run[0].length) ?? [];
        places.push(run.index);
        this.codeRuns.set(run[0].length, places);
      }
      for (const places of this.codeRuns.values()) places.reverse();
    }
    let length = 1;
    while (text[at + length] === "`") length += 1;
    const places = this.codeRuns.get(length) ?? [];
    while (places.length && places.at(-1) < at + length) places.pop();
    if (!places.length) {
      this.push(text.slice(at, at + length));
      this.at += length;
      return;
    }
    const end = places.at(-1);
    let inner = text.slice(at + length, end).replaceAll("\n", " ");
    if (inner.startsWith(" ") && inner.endsWith(" ") && inner.trim()) inner = inner.slice(1, -1);
    this.nodes.push({ type: "code", text: inner });
    this.at = end + length;
  }

  /** A run of *, _ or ~, with whether it may open or close. */
  delimiter(mark) {
    const { text, at } = this;
    let length = 1;
    while (text[at + length] === mark) length += 1;
    const before = at ? text[at - 1] : " ";
    const after = text[at + length] ?? " ";
    const spaceBefore = /\s/.test(before);
    const spaceAfter = /\s/.test(after);
    const punctuationBefore = PUNCTUATION.test(before);
    const punctuationAfter = PUNCTUATION.test(after);
    const left = !spaceAfter && (!punctuationAfter || spaceBefore || punctuationBefore);
    const right = !spaceBefore && (!punctuationBefore || spaceAfter || punctuationAfter);
    const inWord = mark === "_";
    this.nodes.push({
      type: "mark",
      mark,
      count: length,
      whole: length,
      opens: left && (!inWord || !right || punctuationBefore) && (mark !== "~" || length === 2),
      closes: right && (!inWord || !left || punctuationAfter) && (mark !== "~" || length === 2),
    });
    this.at += length;
  }

  openBracket(length) {
    this.brackets.push(this.nodes.length);
    this.nodes.push({ type: "bracket", text: length === 2 ? "![" : "[" });
    this.at += length;
  }

  closeBracket() {
    const open = this.brackets.pop();
    TARGET.lastIndex = this.at + 1;
    const target = open !== undefined && this.text[this.at + 1] === "(" ? TARGET.exec(this.text) : null;
    if (!target) {
      this.push("]");
      this.at += 1;
      return;
    }
    const [{ text: begun }, ...inside] = this.nodes.splice(open);
    const url = (target[1] ?? target[2]).replace(/\\([!-/:-@[-`{-~])/g, "$1");
    if (begun === "![") {
      this.nodes.push({ type: "picture", url, alt: plainText(inside) });
      this.at += 1 + target[0].length;
    } else {
      this.brackets = []; // no link inside a link
      this.link(url, pair(inside), 1 + target[0].length);
    }
  }

  link(url, children, length) {
    this.nodes.push({ type: "link", url, children });
    this.at += length;
  }

  bareUrl() {
    URL_AT.lastIndex = this.at;
    const found = URL_AT.exec(this.text);
    if (!found) {
      this.push(this.text[this.at]);
      this.at += 1;
      return;
    }
    let url = found[0].replace(/[.,:;!?*_~$\]]+$/, "");
    while (url.endsWith(")") && url.split(")").length > url.split("(").length) url = url.slice(0, -1);
    this.link(url, [{ type: "text", text: url }], url.length);
  }

  /** $x$ or $$x$$, unless it looks like money: a space or nothing behind the first, a digit behind the last. */
  dollars() {
    const { text, at } = this;
    const mark = text.startsWith("$$", at) ? "$$" : "$";
    const start = at + mark.length;
    const end = /\s/.test(text[start] ?? " ") && mark === "$" ? -1 : this.mathEnd(mark, start);
    const isMoney = mark === "$" && end >= 0 && (/[\s\\]/.test(text[end - 1]) || /\d/.test(text[end + 1] ?? " "));
    if (end <= start || isMoney) {
      this.push(mark);
      this.at = start;
    } else this.math(start, end, mark.length, mark === "$$");
  }

  mathEnd(mark, start) {
    if (this.noMath.has(mark)) return -1;
    const end = this.text.indexOf(mark, start);
    if (end < 0) this.noMath.add(mark);
    return end;
  }

  math(start, end, length, display) {
    this.nodes.push({ type: "math", text: this.text.slice(start, end).trim(), display });
    this.at = end + length;
  }
}

/** Joins delimiters into emphasis, by CommonMark's rules of openers and closers. */
function pair(nodes) {
  const output = [];
  const openers = []; // places in `output`
  const bottoms = new Map(); // below which no opener for a kind of closer was found
  for (const node of nodes) {
    if (node.type === "bracket") output.push({ type: "text", text: node.text });
    else if (node.type !== "mark") output.push(node);
    else {
      if (node.closes) close(node, output, openers, bottoms);
      if (node.count) {
        if (node.opens) openers.push(output.length);
        output.push(node);
      }
    }
  }
  return joinTexts(output);
}

function close(node, output, openers, bottoms) {
  while (node.count) {
    const key = `${node.mark}${node.opens}${node.whole % 3}`;
    const bottom = bottoms.get(key) ?? 0;
    let index = openers.length - 1;
    while (index >= bottom && !fits(output[openers[index]], node)) index -= 1;
    if (index < bottom) {
      bottoms.set(key, openers.length);
      return;
    }
    const place = openers[index];
    const opener = output[place];
    const used = node.mark === "~" ? 2 : Math.min(2, opener.count, node.count);
    const children = joinTexts(output.splice(place + 1));
    openers.length = index + (opener.count > used ? 1 : 0);
    for (const [kind, floor] of bottoms) if (floor > openers.length) bottoms.set(kind, openers.length);
    opener.count -= used;
    node.count -= used;
    if (!opener.count) output.pop();
    output.push({ type: node.mark === "~" ? "deleted" : used === 2 ? "strong" : "emphasis", children });
  }
}

function fits(opener, closer) {
  if (opener.mark !== closer.mark) return false;
  if (closer.mark === "~") return true;
  const both = (opener.closes && opener.opens) || (closer.closes && closer.opens);
  return !(both && (opener.whole + closer.whole) % 3 === 0 && (opener.whole % 3 || closer.whole % 3));
}

function joinTexts(nodes) {
  const joined = [];
  for (const node of nodes) {
    const text = node.type === "mark" ? node.mark.repeat(node.count) : node.type === "text" ? node.text : null;
    if (text === null) joined.push(node);
    else if (joined.at(-1)?.type === "text") joined.at(-1).text += text;
    else joined.push({ type: "text", text });
  }
  return joined;
}

export function plainText(nodes) {
  return nodes.map((node) => node.text ?? node.alt ?? (node.type === "mark" ? node.mark.repeat(node.count) : plainText(node.children ?? []))).join("");
}
