// Formulas in TeX as MathML, which browsers draw themselves. A subset: what is not known is shown as it was written.

const MATHML = "http://www.w3.org/1998/Math/MathML";
const GREEK = "alpha α beta β gamma γ delta δ epsilon ϵ varepsilon ε zeta ζ eta η theta θ vartheta ϑ iota ι kappa κ lambda λ mu μ nu ν xi ξ pi π rho ρ sigma σ tau τ upsilon υ phi ϕ varphi φ chi χ psi ψ omega ω Gamma Γ Delta Δ Theta Θ Lambda Λ Xi Ξ Pi Π Sigma Σ Phi Φ Psi Ψ Omega Ω infty ∞ partial ∂ nabla ∇ hbar ℏ ell ℓ emptyset ∅ Re ℜ Im ℑ aleph ℵ";
const OPERATORS = "times × cdot ⋅ div ÷ pm ± mp ∓ ast ∗ circ ∘ bullet • leq ≤ le ≤ geq ≥ ge ≥ neq ≠ ne ≠ approx ≈ equiv ≡ sim ∼ simeq ≃ cong ≅ propto ∝ ll ≪ gg ≫ in ∈ notin ∉ ni ∋ subset ⊂ subseteq ⊆ supset ⊃ supseteq ⊇ cup ∪ cap ∩ setminus ∖ wedge ∧ land ∧ vee ∨ lor ∨ neg ¬ lnot ¬ forall ∀ exists ∃ to → rightarrow → leftarrow ← Rightarrow ⇒ Leftarrow ⇐ leftrightarrow ↔ Leftrightarrow ⇔ iff ⟺ implies ⟹ mapsto ↦ longrightarrow ⟶ uparrow ↑ downarrow ↓ mid ∣ parallel ∥ perp ⊥ angle ∠ cdots ⋯ ldots … dots … vdots ⋮ ddots ⋱ oplus ⊕ otimes ⊗ langle ⟨ rangle ⟩ lfloor ⌊ rfloor ⌋ lceil ⌈ rceil ⌉ lvert | rvert | Vert ‖ | ‖ { { } } prime ′ % % & & # # _ _ $ $ colon : therefore ∴ because ∵";
const LARGE = "sum ∑ prod ∏ int ∫ iint ∬ iiint ∭ oint ∮ bigcup ⋃ bigcap ⋂";
const table = (text) => new Map(text.split(" ").reduce((pairs, word, index, all) => (index % 2 ? pairs : [...pairs, [word, all[index + 1]]]), []));
const greek = table(GREEK);
const operators = table(OPERATORS);
const large = table(LARGE);
const FUNCTIONS = new Set("sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln lg exp lim max min sup inf det dim ker gcd arg deg Pr mod argmax argmin".split(" "));
const LIMITS = new Set("lim max min sup inf det gcd argmax argmin".split(" "));
const SPACES = new Map([[",", ".17em"], [":", ".22em"], [";", ".28em"], [" ", ".3em"], ["quad", "1em"], ["qquad", "2em"], ["!", "0"]]);
const ACCENTS = new Map([["hat", "^"], ["widehat", "^"], ["bar", "¯"], ["overline", "¯"], ["vec", "→"], ["tilde", "~"], ["widetilde", "~"], ["dot", "˙"], ["ddot", "¨"]]);
const FONTS = new Map([["mathbb", "double-struck"], ["mathcal", "script"], ["mathbf", "bold"], ["boldsymbol", "bold"], ["bm", "bold"], ["mathfrak", "fraktur"]]);
const FENCES = new Map([["pmatrix", "()"], ["bmatrix", "[]"], ["Bmatrix", "{}"], ["vmatrix", "||"], ["cases", "{ "], ["matrix", "  "], ["aligned", "  "], ["align", "  "], ["align*", "  "], ["array", "  "], ["gathered", "  "], ["split", "  "]]);
const TOKEN = /\\([A-Za-z]+\*?|[^A-Za-z])|[0-9]+(?:\.[0-9]+)?|\s+|[\s\S]/gu;
const MAX_LENGTH = 4000;
const MAX_DEPTH = 40;

/** A formula, or its source as code where it cannot be read. */
export function mathNode(source, display) {
  try {
    if (source.length > MAX_LENGTH) throw new Error("too long");
    const reader = new Reader(source);
    const content = reader.row(() => reader.done);
    const math = make("math", {}, content);
    if (display) math.setAttribute("display", "block");
    math.setAttribute("aria-label", source);
    return math;
  } catch {
    const code = document.createElement("code");
    code.textContent = source;
    return code;
  }
}

function make(name, attributes = {}, ...children) {
  const node = document.createElementNS(MATHML, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

const text = (name, content, attributes) => make(name, attributes, content);

class Reader {
  constructor(source) {
    this.tokens = [...source.matchAll(TOKEN)].map((found) => found[0]).filter((token) => token.trim() || token.startsWith("\\"));
    this.at = 0;
    this.depth = 0;
  }

  get done() {
    return this.at >= this.tokens.length;
  }

  get next() {
    return this.tokens[this.at];
  }

  take(expected) {
    const token = this.tokens[this.at];
    if (token === undefined || (expected && token !== expected)) throw new Error("unfinished");
    this.at += 1;
    return token;
  }

  row(isEnd) {
    this.depth += 1;
    if (this.depth > MAX_DEPTH) throw new Error("too deep");
    const nodes = [];
    while (!isEnd()) {
      if (this.done) throw new Error("unfinished");
      nodes.push(this.scripted());
    }
    this.depth -= 1;
    return nodes.length === 1 ? nodes[0] : make("mrow", {}, ...nodes);
  }

  /** An atom with what stands below and above it. */
  scripted() {
    const base = this.atom();
    let below;
    let above;
    while (this.next === "_" || this.next === "^" || this.next === "'") {
      const mark = this.take();
      if (mark === "'") above = text("mo", "′");
      else if (mark === "_") below = this.argument();
      else above = this.argument();
    }
    const limits = base.dataset?.limits || base.getAttribute("data-limits");
    if (below && above) return make(limits ? "munderover" : "msubsup", {}, base, below, above);
    if (below) return make(limits ? "munder" : "msub", {}, base, below);
    return above ? make(limits ? "mover" : "msup", {}, base, above) : base;
  }

  argument() {
    return this.next === "{" ? this.group() : this.atom();
  }

  group() {
    this.take("{");
    const node = this.row(() => this.next === "}");
    this.take("}");
    return node;
  }

  /** The text between braces, as it is. */
  words() {
    this.take("{");
    const parts = [];
    for (let open = 1; ; ) {
      const token = this.take();
      open += token === "{" ? 1 : token === "}" ? -1 : 0;
      if (!open) return parts.join("");
      parts.push(token.startsWith("\\") && token.length === 2 ? token[1] : token);
    }
  }

  atom() {
    const token = this.take();
    if (token === "{") {
      this.at -= 1;
      return this.group();
    }
    if (token === "}" || token === "^" || token === "_" || token === "&") throw new Error("misplaced");
    if (token.startsWith("\\") && token.length > 1) return this.command(token.slice(1));
    if (/^\d/.test(token)) return text("mn", token);
    if (/^\p{L}$/u.test(token)) return text("mi", token);
    return text("mo", token === "-" ? "−" : token, "()[]|".includes(token) ? { stretchy: "false" } : {});
  }

  command(name) {
    if (greek.has(name)) return text("mi", greek.get(name));
    if (large.has(name)) return text("mo", large.get(name), name.includes("int") ? {} : { "data-limits": "1" });
    if (FUNCTIONS.has(name)) return text("mi", name, LIMITS.has(name) ? { "data-limits": "1" } : {});
    if (operators.has(name)) return text("mo", operators.get(name));
    if (SPACES.has(name)) return make("mspace", { width: SPACES.get(name) });
    if (ACCENTS.has(name)) return make("mover", { accent: "true" }, this.argument(), text("mo", ACCENTS.get(name), { stretchy: name.length > 5 }));
    if (FONTS.has(name)) return this.font(FONTS.get(name));
    switch (name) {
      case "frac":
      case "dfrac":
      case "tfrac":
        return make("mfrac", {}, this.argument(), this.argument());
      case "binom":
        return make("mrow", {}, text("mo", "("), make("mfrac", { linethickness: "0" }, this.argument(), this.argument()), text("mo", ")"));
      case "sqrt":
        return this.root();
      case "text":
      case "textbf":
      case "textit":
      case "mathrm":
      case "operatorname":
      case "mbox":
        return text("mtext", this.words().replaceAll(" ", " "));
      case "underline":
        return make("munder", {}, this.argument(), text("mo", "_"));
      case "boxed":
      case "displaystyle":
      case "textstyle":
      case "limits":
      case "nonumber":
        return name === "boxed" ? make("menclose", { notation: "box" }, this.argument()) : make("mrow");
      case "left":
        return this.fenced();
      case "begin":
        return this.environment();
      case "\\":
        return make("mspace", { linebreak: "newline" });
      default:
        if (/^[bB]igg?[lr]?$/.test(name)) return this.atom();
        throw new Error(`unknown: ${name}`);
    }
  }

  font(variant) {
    const content = this.next === "{" ? this.words() : this.take();
    return text("mi", [...content].map((letter) => styled(letter, variant)).join(""));
  }

  root() {
    if (this.next !== "[") return make("msqrt", {}, this.argument());
    this.take("[");
    const index = this.row(() => this.next === "]");
    this.take("]");
    return make("mroot", {}, this.argument(), index);
  }

  fence() {
    const token = this.take();
    if (token === ".") return "";
    return token.startsWith("\\") ? (operators.get(token.slice(1)) ?? "") : token;
  }

  fenced() {
    const open = this.fence();
    const inner = this.row(() => this.next === "\\right");
    this.take("\\right");
    return make("mrow", {}, text("mo", open, { fence: "true" }), inner, text("mo", this.fence(), { fence: "true" }));
  }

  environment() {
    const name = this.words();
    if (!FENCES.has(name)) throw new Error(`unknown: ${name}`);
    if (name === "array" && this.next === "{") this.words();
    const rows = [[]];
    while (this.next !== "\\end") {
      rows.at(-1).push(make("mtd", {}, this.row(() => this.next === "&" || this.next === "\\\\" || this.next === "\\end")));
      if (this.next === "&") this.take();
      else if (this.next === "\\\\") {
        this.take();
        if (this.next !== "\\end") rows.push([]);
      }
    }
    this.take("\\end");
    if (this.words() !== name) throw new Error("misplaced end");
    const grid = make("mtable", {}, ...rows.map((cells) => make("mtr", {}, ...cells)));
    const [open, close] = FENCES.get(name);
    return make("mrow", {}, ...(open.trim() ? [text("mo", open, { fence: "true" })] : []), grid, ...(close.trim() ? [text("mo", close, { fence: "true" })] : []));
  }
}

const STARTS = { "double-struck": [0x1d538, 0x1d552, 0x1d7d8], script: [0x1d49c, 0x1d4b6, 0], bold: [0x1d400, 0x1d41a, 0x1d7ce], fraktur: [0x1d504, 0x1d51e, 0] };
// Letters that Unicode had before it had whole alphabets of them.
const EARLIER = { "double-struck": "CℂHℍNℕPℙQℚRℝZℤ", script: "BℬEℰFℱHℋIℐLℒMℳRℛeℯgℊoℴ", fraktur: "CℭHℌIℑRℜZℨ", bold: "" };

function styled(letter, variant) {
  const earlier = EARLIER[variant].indexOf(letter);
  if (earlier >= 0 && earlier % 2 === 0) return EARLIER[variant][earlier + 1];
  const [upper, lower, digit] = STARTS[variant];
  const code = letter.codePointAt(0);
  if (letter >= "A" && letter <= "Z") return String.fromCodePoint(upper + code - 65);
  if (letter >= "a" && letter <= "z") return String.fromCodePoint(lower + code - 97);
  return letter >= "0" && letter <= "9" && digit ? String.fromCodePoint(digit + code - 48) : letter;
}
