// Colours for code: comments, strings, numbers, keywords, names of calls and types. A scanner for all languages, with a
// short description of each; what it does not know stays plain.

const words = (text) => new Set(text.split(" "));
const C_LIKE = "if else for while do switch case default break continue return struct enum const static void int long short char float double bool unsigned signed sizeof typedef union extern goto volatile inline true false NULL nullptr auto";
const LANGUAGES = {
  python: {
    keywords: words("and as assert async await break class continue def del elif else except finally for from global if import in is lambda match case nonlocal not or pass raise return try while with yield True False None self"),
    comment: "#.*",
    string: `[rbfuRBFU]{0,2}(?:"""[\\s\\S]*?(?:"""|$)|'''[\\s\\S]*?(?:'''|$)|"(?:[^"\\\\\\n]|\\\\.)*"?|'(?:[^'\\\\\\n]|\\\\.)*'?)`,
  },
  javascript: {
    keywords: words("async await break case catch class const continue debugger default delete do else export extends finally for from function get if import in instanceof interface let new of return set static super switch this throw try type typeof undefined var void while with yield true false null enum implements private protected public readonly as declare namespace keyof never unknown any string number boolean"),
    string: '`(?:[^`\\\\]|\\\\.)*`?|"(?:[^"\\\\\\n]|\\\\.)*"?|\'(?:[^\'\\\\\\n]|\\\\.)*\'?',
  },
  c: { keywords: words(`${C_LIKE} #include #define #ifdef #ifndef #endif #if #pragma class public private protected virtual override template typename namespace using new delete this throw try catch operator friend constexpr noexcept string vector std size_t uint8_t uint32_t uint64_t int32_t int64_t`) },
  java: { keywords: words(`${C_LIKE} abstract boolean byte catch class extends final finally implements import instanceof interface native new null package private protected public super synchronized this throw throws transient try var record sealed string namespace using async await foreach in is out ref get set decimal object internal partial readonly fun val when companion data override suspend lateinit let guard func protocol extension self nil init weak`) },
  go: { keywords: words("break case chan const continue default defer else fallthrough for func go goto if import interface map package range return select struct switch type var true false nil string int int64 int32 uint8 byte rune float64 bool error make append len"), string: '`[^`]*`?|"(?:[^"\\\\\\n]|\\\\.)*"?|\'(?:[^\'\\\\\\n]|\\\\.)*\'?' },
  rust: { keywords: words("as async await break const continue crate dyn else enum extern false fn for if impl in let loop match mod move mut pub ref return self Self static struct super trait true type unsafe use where while i8 i16 i32 i64 u8 u16 u32 u64 usize isize f32 f64 bool str String Vec Option Result Some None Ok Err"), string: '"(?:[^"\\\\]|\\\\.)*"?|\'(?:[^\'\\\\\\n]|\\\\.)\'' },
  ruby: { keywords: words("alias and begin break case class def defined? do else elsif end ensure false for if in module next nil not or redo rescue retry return self super then true undef unless until when while yield puts require attr_accessor local function repeat elseif"), comment: "#.*|--.*" },
  shell: { keywords: words("if then else elif fi for while until do done case esac in function return exit export local readonly source echo cd set unset sudo pip npm curl git docker make FROM RUN COPY CMD ENTRYPOINT ENV WORKDIR ARG EXPOSE"), comment: "(?<![^\\s;])#.*", string: '"(?:[^"\\\\]|\\\\.)*"?|\'[^\']*\'?', number: "(?<![\\w-])\\d+(?:\\.\\d+)?\\b|\\$\\{?\\w+\\}?" },
  sql: { keywords: words("add all alter and as asc between by case check column constraint create cross database default delete desc distinct drop else end exists foreign from full group having if in index inner insert into is join key left like limit not null offset on or order outer primary references returning right select set table then union unique update values view when where with int integer text varchar boolean date timestamp count sum avg min max"), comment: "--.*|/\\*[\\s\\S]*?(?:\\*/|$)", anyCase: true },
  json: { keywords: words("true false null"), comment: "(?!)" },
  yaml: { keywords: words("true false null yes no on off"), comment: "(?<![^\\s])#.*", type: "^[ \\t-]*[\\w.\"'-]+(?=\\s*[:=](?:\\s|$))|^\\[[^\\]\\n]*\\]" },
  css: { keywords: words("@media @import @font-face @keyframes @supports !important"), comment: "/\\*[\\s\\S]*?(?:\\*/|$)", type: "[\\w-]+(?=\\s*:[^:{]*[;}\\n])", number: "#[0-9a-fA-F]{3,8}\\b|-?\\b\\d+(?:\\.\\d+)?(?:px|r?em|%|vh|vw|s|ms|deg|fr)?" },
  html: { keywords: words(""), comment: "<!--[\\s\\S]*?(?:-->|$)", name: "</?[A-Za-z][\\w:-]*|/?>", type: "[\\w:-]+(?==)" },
  diff: { keywords: words(""), comment: "^@@.*$|^(?:diff|index|---|\\+\\+\\+).*$", string: "^\\+.*$", keyword: "^-.*$", number: "(?!)" },
};
const OTHER_NAMES = {
  py: "python", python3: "python", pycon: "python", js: "javascript", jsx: "javascript", ts: "javascript", tsx: "javascript", typescript: "javascript", mjs: "javascript", node: "javascript",
  cpp: "c", "c++": "c", cc: "c", h: "c", hpp: "c", cuda: "c", cu: "c", objc: "c", glsl: "c",
  cs: "java", csharp: "java", "c#": "java", kotlin: "java", kt: "java", swift: "java", scala: "java", dart: "java", php: "java",
  golang: "go", rs: "rust", rb: "ruby", lua: "ruby", elixir: "ruby", perl: "ruby", r: "python", julia: "ruby",
  sh: "shell", bash: "shell", zsh: "shell", console: "shell", dockerfile: "shell", makefile: "shell", powershell: "shell", ps1: "shell",
  postgresql: "sql", mysql: "sql", sqlite: "sql", json5: "json", jsonc: "json", jsonl: "json", yml: "yaml", toml: "yaml", ini: "yaml", conf: "yaml",
  scss: "css", less: "css", xml: "html", svg: "html", vue: "html", svelte: "html", patch: "diff",
};
const MAX_LENGTH = 200_000; // characters; longer code stays plain

const compiled = new Map();

function scannerOf(language) {
  if (!compiled.has(language)) {
    const own = LANGUAGES[language];
    const parts = {
      comment: own.comment ?? "//.*|/\\*[\\s\\S]*?(?:\\*/|$)",
      string: own.string ?? '"(?:[^"\\\\\\n]|\\\\.)*"?|\'(?:[^\'\\\\\\n]|\\\\.)*\'?',
      type: own.type ?? "\\b[A-Z]\\w*[a-z]\\w*\\b",
      keyword: own.keyword ?? "(?!)",
      number: own.number ?? "\\b0[xXbBoO][\\da-fA-F_]+\\b|\\b\\d[\\d_]*(?:\\.\\d+)?(?:[eE][+-]?\\d+)?\\b",
      name: own.name ?? "[A-Za-z_$][\\w$]*(?=\\s*\\()",
      word: "[@#!]?[A-Za-z_$][\\w$?-]*",
    };
    const source = Object.entries(parts).map(([kind, pattern]) => `(?<${kind}>${pattern})`).join("|");
    compiled.set(language, new RegExp(source, "gm"));
  }
  return compiled.get(language);
}

/** [[kind, text], ...] with kinds "", comment, string, number, keyword, name and type; joined they are `code`. */
export function highlight(code, language) {
  const known = OTHER_NAMES[language] ?? language;
  if (!Object.hasOwn(LANGUAGES, known) || code.length > MAX_LENGTH) return [["", code]];
  const { keywords, anyCase } = LANGUAGES[known];
  const pieces = [];
  let at = 0;
  for (const found of code.matchAll(scannerOf(known))) {
    const text = found[0];
    if (!text) continue;
    let [kind] = Object.entries(found.groups).find(([, value]) => value !== undefined);
    if (keywords.has(anyCase ? text.toLowerCase() : text)) kind = "keyword";
    if (kind === "word") continue;
    if (found.index > at) pieces.push(["", code.slice(at, found.index)]);
    pieces.push([kind, text]);
    at = found.index + text.length;
  }
  if (at < code.length) pieces.push(["", code.slice(at)]);
  return pieces;
}
