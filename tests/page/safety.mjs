// Nothing that a model, a file or a server says runs, loads or leads where it should not; failures are told.

import assert from "node:assert/strict";
import { begin, event, refusing, speaking } from "./double.mjs";
import { HOSTILE } from "./hostile.mjs";
import { ask, send, settled, shoot, until, visit } from "./helpers.mjs";

async function watch(page) {
  await page.addInitScript(() => {
    window.calls = [];
    window.pwned = (number) => window.calls.push(number);
    window.violations = [];
    addEventListener("securitypolicyviolation", (event) => window.violations.push(`${event.violatedDirective} ${event.blockedURI}`));
  });
}

/** Clicks what can be clicked in the messages, and looks for anything that does not belong there. */
async function inspect(page, requests, origin) {
  const found = await page.evaluate(() => {
    const thread = document.querySelector("#thread");
    for (const node of thread.querySelectorAll("a")) node.addEventListener("click", (event) => event.preventDefault());
    for (const node of thread.querySelectorAll("a, summary, .markdown *")) {
      node.dispatchEvent(new MouseEvent("mouseover", { bubbles: true }));
      node.click?.();
    }
    const nodes = [...document.querySelectorAll("*")];
    return {
      calls: window.calls,
      violations: window.violations,
      handlers: nodes.flatMap((node) => [...node.attributes].filter((attribute) => /^(on|style$|srcdoc$|formaction$|action$)/.test(attribute.name)).map((attribute) => `${node.localName} ${attribute.name}`)).filter((text) => text !== "textarea style"),
      elements: [...new Set([...thread.querySelectorAll(":not(form.results)")].map((node) => node.localName))].filter((name) => ["script", "iframe", "object", "embed", "style", "link", "base", "meta", "form", "video", "audio", "svg:script"].includes(name)),
      links: [...thread.querySelectorAll("a")].map((node) => new URL(node.href).protocol),
      pictures: [...thread.querySelectorAll("img")].map((node) => node.src.slice(0, 15)),
    };
  });
  assert.deepEqual(found.calls, []);
  assert.deepEqual(found.violations, []);
  assert.deepEqual(found.handlers, []);
  assert.deepEqual(found.elements, []);
  assert.ok(found.links.every((protocol) => ["http:", "https:", "mailto:"].includes(protocol)), String(found.links));
  assert.ok(found.pictures.every((start) => start.startsWith("data:image/png")), String(found.pictures));
  assert.deepEqual(requests.map((request) => request.url()).filter((url) => !/^(data|blob):/.test(url) && !url.startsWith(`${origin}/`)), []);
}

export async function hostile_answers_do_nothing({ page, double, requests }) {
  await watch(page);
  double.answers.hostile = speaking(HOSTILE.join("\n\n"), 9);
  double.answers.hostile_lines = speaking(HOSTILE.join("\n"), 4);
  double.answers.hostile_thoughts = async (to) => {
    begin(to);
    event(to, { content: "", reasoning_content: HOSTILE.join("\n\n") });
    event(to, { tool_calls: [{ index: 0, id: "<img src=x onerror=pwned(40)>", type: "function", function: { name: "<img src=x onerror=pwned(41)>", arguments: "<script>pwned(42)</script>" } }] });
    to.write(`data: ${JSON.stringify({ model: "<img src=x onerror=pwned(43)>", choices: [] })}\n\n`);
    to.end(`data: ${JSON.stringify({ error: { message: "<img src=x onerror=pwned(44)>" } })}\n\n`);
  };
  await visit(page, double.url);
  for (const name of ["hostile", "hostile_lines", "hostile_thoughts"]) await ask(page, `double:${name} ${HOSTILE[1]}`);
  await inspect(page, requests, double.url);
  assert.match(await page.locator(".markdown").first().innerText(), /<script>pwned\(1\)<\/script>/);
}

export async function hostile_files_do_nothing({ page, server, requests }) {
  await watch(page);
  await visit(page, server);
  const evil = "<img src=x onerror=pwned(50)>";
  const messages = [];
  for (const [index, content] of HOSTILE.entries()) {
    messages.push({ id: `u${index}`, parent: index ? `a${index - 1}` : null, role: "user", content, files: [{ name: evil, text: evil }], pictures: ["https://example.invalid/x.png", "javascript:pwned(51)", `data:image/svg+xml;base64,${btoa(evil)}`] });
    messages.push({ id: `a${index}`, parent: `u${index}`, role: "assistant", content, reasoning: content, calls: [{ id: evil, name: evil, arguments: evil }], tokens: [{ text: evil, logprob: "x", top: [[evil, -1]] }], made: { model: evil, label: evil, server: "https://example.invalid", seed: evil }, group: evil, finish: evil });
  }
  const file = { form: "tgi-chat", version: 1, conversations: [{ id: "x", title: evil, system: evil, settings: { temperature: evil, __proto__: 1 }, messages, chosen: { __proto__: "u0", start: "u0" } }, null, 7, { messages: [{ role: "root" }, 3, null] }] };
  await page.setInputFiles("#import-file", [{ name: "evil.json", mimeType: "application/json", buffer: Buffer.from(JSON.stringify(file)) }]);
  await until(async () => (await page.locator(".message").count()) === 2 * HOSTILE.length, "the messages");
  await page.locator(".message.assistant [aria-label='Show tokens']").first().click();
  await inspect(page, requests, server);
}

/** Texts that make careless parsers slow. The page must stay usable while they come. */
export async function heavy_answers_do_not_block({ page, double }) {
  const heavy = ["*a ".repeat(8000), "[".repeat(8000), "`".repeat(999), "> ".repeat(4000), "- ".repeat(4000), "|a".repeat(4000), "$".repeat(5001), "**a* ".repeat(4000), "\\left(".repeat(1500), `$${"{".repeat(3000)}$`, "- a\n".repeat(2000)];
  double.answers.heavy = speaking(heavy.join("\n\n"), 4000);
  await visit(page, double.url);
  await ask(page, "double:heavy");
  assert.ok((await page.locator(".body > .markdown").innerText()).length > 50_000);
}

export async function failures_are_told_and_can_be_tried_again({ page, double }) {
  const busy = { error: { message: "Model is overloaded", type: "rate_limit_error" } };
  let count = 0;
  double.answers.busy = (to) => (count++ ? speaking("Now.")(to) : refusing(429, busy, { "retry-after": "1" })(to));
  double.answers.starting = refusing(503, { error: { message: "the engine is starting" } });
  double.answers.broken = refusing(500, { error: { message: "Request failed during generation: <b>boom</b>" } });
  double.answers.odd = (to) => {
    to.writeHead(502);
    to.end("Bad gateway of a proxy");
  };
  double.answers.cut = (to) => {
    begin(to);
    event(to, { content: "Half an ans" });
    setTimeout(() => to.destroy(), 100);
  };
  double.answers.stumbles = (to) => {
    begin(to);
    event(to, { content: "So far" });
    to.end(`data: ${JSON.stringify({ error: { message: "the model stumbled", http_status_code: 424 } })}\n\n`);
  };
  await visit(page, double.url);
  const told = async (name, expected) => {
    await page.click("#new");
    await ask(page, `double:${name}`);
    assert.match((await page.locator(".error").innerText()).replaceAll("\n", " "), expected);
  };
  await told("starting", /Overloaded\. \(503\) The server cannot answer now: the engine is starting/);
  await told("broken", /Failed\. \(500\) Request failed during generation: <b>boom<\/b>/);
  await told("odd", /Failed\. \(502\) Bad gateway of a proxy/);
  await told("stumbles", /Failed\. \(424\) the model stumbled/);
  await told("cut", /Cut off\. The connection ended before the answer did/);
  assert.match(await page.locator(".message.assistant .markdown").innerText(), /Half an ans/);
  assert.equal(await page.locator("[aria-label='Continue']").count(), 1);
  await told("busy", /Overloaded\. \(429\) The server has too much to do: Model is overloaded/);
  await shoot(page, "failure");
  await page.click(".error button");
  await settled(page, 1);
  assert.equal(await page.locator(".message.assistant .body").innerText(), "Now.");
}

export async function the_page_stands_alone({ page, server, requests }) {
  await visit(page, server);
  await page.waitForTimeout(800); // links are looked up when all else is there
  assert.deepEqual([...new Set(requests.map((request) => new URL(request.url()).origin))], [server]);
  const sizes = await Promise.all(requests.filter((request) => !/\/(info|health|api-doc)/.test(request.url())).map(async (request) => (await request.sizes()).responseBodySize));
  assert.ok(sizes.length > 20 && Math.min(...sizes) > 0, String(sizes));
  assert.ok(sizes.reduce((sum, size) => sum + size) < 200_000, String(sizes));
  const names = new Set(requests.map((request) => new URL(request.url()).pathname));
  const preloaded = await page.locator("link[rel=modulepreload]").evaluateAll((links) => links.map((link) => new URL(link.href).pathname));
  const modules = [...names].filter((name) => name.endsWith(".js") && !/main.js|theme.js/.test(name));
  assert.deepEqual(preloaded.sort(), modules.sort()); // each module is asked for at once, and no other
}
