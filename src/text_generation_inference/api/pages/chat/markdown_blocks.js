// Markdown by lines: paragraphs, headings, lists, quotes, tables, code, formulas. Text to a list of plain objects.
//
// Each top block has the `source` it was made of, so that a view of a growing text makes again only what has changed.

const FENCE = /^( {0,3})(`{3,}|~{3,})\s*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:\s+(.*?))?(?:\s+#+)?\s*$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(\s+|$)/;
const TABLE_RULE = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const MATH_OPEN = /^\s*(\$\$|\\\[)/;
const MAX_DEPTH = 20; // of quotes and lists in each other; what is deeper is text

export function parseBlocks(text, depth = 0) {
  const lines = text.replace(/\r\n?/g, "\n").split("\n");
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const start = at;
    const [block, next] = parseBlock(lines, at, depth);
    at = Math.max(next, start + 1);
    block.source = lines.slice(start, at).join("\n");
    blocks.push(block);
  }
  return blocks;
}

function parseBlock(lines, at, depth) {
  const line = lines[at];
  const fence = FENCE.exec(line);
  if (fence) return parseFence(lines, at, fence);
  const heading = HEADING.exec(line);
  if (heading) return [{ type: "heading", level: heading[1].length, text: heading[2] ?? "" }, at + 1];
  if (RULE.test(line)) return [{ type: "rule" }, at + 1];
  if (MATH_OPEN.test(line)) {
    const math = parseMath(lines, at);
    if (math) return math;
  }
  if (depth < MAX_DEPTH) {
    if (QUOTE.test(line)) return parseQuote(lines, at, depth);
    if (ITEM.test(line)) return parseList(lines, at, depth);
  }
  if (isTable(lines, at)) return parseTable(lines, at);
  return parseParagraph(lines, at, depth);
}

function parseFence(lines, at, [, indent, fence, info]) {
  const end = new RegExp(`^ {0,3}${fence[0]}{${fence.length},}\\s*$`);
  const inner = [];
  let next = at + 1;
  while (next < lines.length && !end.test(lines[next])) {
    inner.push(lines[next].startsWith(indent) ? lines[next].slice(indent.length) : lines[next].trimStart());
    next += 1;
  }
  const closed = next < lines.length;
  return [{ type: "code", language: info.trim().split(/\s+/)[0].toLowerCase(), text: inner.join("\n"), closed }, next + 1];
}

function parseMath(lines, at) {
  const open = MATH_OPEN.exec(lines[at]);
  const close = open[1] === "$$" ? "$$" : "\\]";
  const inner = [];
  for (let next = at; next < lines.length; next += 1) {
    const rest = next === at ? lines[at].slice(open[0].length) : lines[next];
    const end = rest.indexOf(close);
    if (end >= 0) {
      if (rest.slice(end + close.length).trim()) return null; // more text behind it: a formula in a paragraph
      inner.push(rest.slice(0, end));
      return [{ type: "math", text: inner.join("\n").trim() }, next + 1];
    }
    if (!rest.trim() && next > at) return null;
    inner.push(rest);
  }
  return null;
}

function parseQuote(lines, at, depth) {
  const inner = [];
  let next = at;
  while (next < lines.length && (QUOTE.test(lines[next]) || (lines[next].trim() && inner.at(-1)?.trim() && !startsBlock(lines[next])))) {
    inner.push(lines[next].replace(QUOTE, ""));
    next += 1;
  }
  return [{ type: "quote", blocks: parseBlocks(inner.join("\n"), depth + 1) }, next];
}

const width = (space) => space.replaceAll("\t", "    ").length;

function parseList(lines, at, depth) {
  const first = ITEM.exec(lines[at]);
  const indent = width(first[1]);
  const ordered = /\d/.test(first[2]);
  const kind = first[2].at(-1);
  const list = { type: "list", ordered, start: ordered ? Number.parseInt(first[2], 10) : 1, items: [], loose: false };
  let next = at;
  while (next < lines.length) {
    const item = ITEM.exec(lines[next]);
    if (!item || width(item[1]) > indent + 3 || width(item[1]) < indent || item[2].at(-1) !== kind || RULE.test(lines[next])) break;
    const [inner, end, gap] = takeItem(lines, next, item);
    const task = /^\[([ xX])\]\s/.exec(inner[0]);
    if (task) inner[0] = inner[0].slice(task[0].length);
    list.items.push({ blocks: parseBlocks(inner.join("\n"), depth + 1), task: task ? task[1] !== " " : null });
    list.loose ||= gap && end < lines.length && ITEM.test(lines[end]);
    next = end;
  }
  return [list, next];
}

/** The lines of an item without their indent, the line behind it, and whether blank lines end it. */
function takeItem(lines, at, item) {
  const own = width(item[1]) + item[2].length + 1;
  const inner = [lines[at].slice(item[0].length)];
  let next = at + 1;
  let blanks = 0;
  let fence = FENCE.exec(inner[0])?.[2] ?? "";
  while (next < lines.length) {
    const line = lines[next];
    const space = width(/^\s*/.exec(line)[0]);
    if (!line.trim()) blanks += 1;
    else if (space >= Math.min(own, width(item[1]) + 2) || (!blanks && !fence && !startsBlock(line))) {
      for (; blanks; blanks -= 1) inner.push("");
      const bare = line.replace(/^\s*/, (given) => " ".repeat(Math.max(0, width(given) - own)));
      inner.push(bare);
      const mark = FENCE.exec(bare)?.[2] ?? "";
      if (mark) fence = !fence ? mark : mark.startsWith(fence) ? "" : fence;
    } else break;
    next += 1;
  }
  return [inner, next, blanks > 0];
}

function isTable(lines, at) {
  const rule = lines[at + 1];
  return rule !== undefined && lines[at].includes("|") && rule.includes("-") && TABLE_RULE.test(rule) && cells(lines[at]).length === cells(rule).length;
}

function cells(line) {
  const inner = line.trim().replace(/^\|/, "").replace(/\|$/, "");
  return inner.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function parseTable(lines, at) {
  const align = cells(lines[at + 1]).map((cell) => (cell.startsWith(":") && cell.endsWith(":") ? "center" : cell.endsWith(":") ? "right" : ""));
  const rows = [];
  let next = at + 2;
  while (next < lines.length && lines[next].includes("|") && lines[next].trim() && !startsBlock(lines[next])) {
    const row = cells(lines[next]).slice(0, align.length);
    while (row.length < align.length) row.push("");
    rows.push(row);
    next += 1;
  }
  return [{ type: "table", head: cells(lines[at]), align, rows }, next];
}

function startsBlock(line) {
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line);
}

function parseParagraph(lines, at, depth) {
  const inner = [lines[at].trim()];
  let next = at + 1;
  while (next < lines.length && lines[next].trim() && !isTable(lines, next)) {
    const item = ITEM.exec(lines[next]);
    const isItem = item && depth < MAX_DEPTH && item[3] && (!/\d/.test(item[2]) || /^1[.)]/.test(item[2]));
    const isOther = startsBlock(lines[next]) && !item && !(depth >= MAX_DEPTH && QUOTE.test(lines[next]));
    if (isItem || isOther || (MATH_OPEN.test(lines[next]) && parseMath(lines, next))) break;
    inner.push(lines[next].trim());
    next += 1;
  }
  return [{ type: "paragraph", text: inner.join("\n") }, next];
}
