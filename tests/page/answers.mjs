// Answers: streamed, stopped, retried, edited, continued, forked, side by side.

import assert from "node:assert/strict";
import { event, begin, end, speaking } from "./double.mjs";
import { ask, kept, metric, send, set, settled, shoot, until, visit } from "./helpers.mjs";

const QUESTION = "Explain gravity in three sentences.";

export async function an_answer_streams_and_is_what_the_server_says({ page, server }) {
  await visit(page, server);
  assert.equal(await page.locator("#model").innerText(), "embedded");
  assert.match(await page.locator("#facts").innerText(), /1,024 tokens/);
  await set(page, { temperature: 0, max_tokens: 60 });
  await page.evaluate(() => {
    window.grown = new Set();
    const note = () => window.grown.add(document.querySelector(".message.running .markdown")?.textContent.length ?? 0);
    new MutationObserver(note).observe(document.body, { subtree: true, childList: true, characterData: true });
  });
  await send(page, QUESTION);
  await until(async () => !(await page.locator(".message.running").count()), "the answer");
  const lengths = await page.evaluate(() => [...window.grown]);
  assert.ok(lengths.length > 3, `it grew: ${lengths}`);
  const body = { messages: [{ role: "user", content: QUESTION }], temperature: 0, max_tokens: 60 };
  const reply = await fetch(`${server}/v1/chat/completions`, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) });
  const expected = (await reply.json()).choices[0].message.content;
  const [conversation] = await kept(page);
  assert.equal(conversation.messages[1].content, expected);
  assert.equal(conversation.title, QUESTION);
  const notes = await page.locator(".message.assistant .notes").innerText();
  assert.match(notes, /^\d+ tokens · [\d.]+ tokens\/s · first after [\d.]+ s · prompt \d+/);
  assert.match(notes, /seed \d+/);
  assert.equal(await page.locator("#live").textContent(), `Answer: ${expected}`);
  // The second turn finds the first in the prefix cache.
  await ask(page, "And on the moon?");
  assert.match(await page.locator(".message.assistant .notes").last().innerText(), /prompt \d+, \d+ of it from the cache/);
  await until(async () => /\d+ of 1024 tokens/.test(await page.locator("#count").innerText()), "the count");
  await page.fill("#message", "four more words here");
  await until(async () => /^4 new/.test(await page.locator("#count").innerText()), "the count of the draft");
  await shoot(page, "answer");
}

export async function stop_frees_the_slot_and_the_rest_can_follow({ page, server }) {
  await visit(page, server);
  await set(page, { ignore_eos: true, max_tokens: 900, temperature: 0 });
  await send(page, QUESTION);
  await page.waitForSelector(".message.running .markdown p");
  await page.click("#send[aria-label='Stop']");
  await settled(page, 1);
  await until(async () => (await metric(server, "tgi_batch_current_size")) === 0, "the server to be idle");
  assert.match(await page.locator(".notes").last().innerText(), /stopped/);
  const before = (await kept(page))[0].messages[1].content;
  assert.ok(before.length > 0);
  await set(page, { max_tokens: 10 });
  await page.click("[aria-label='Continue']");
  await settled(page, 1);
  const after = (await kept(page))[0].messages[1].content;
  assert.ok(after.startsWith(before) && after.length > before.length, `${before} | ${after}`);
}

export async function retries_and_edits_are_branches({ page, server }) {
  await visit(page, server);
  await set(page, { max_tokens: 12, temperature: 1.5 });
  const first = await ask(page, "Say something.");
  await page.click("[aria-label='Retry']");
  await page.waitForFunction(() => document.querySelector(".version")?.textContent === "2 / 2" && !document.querySelector(".running"));
  const second = await page.locator(".message.assistant .body").innerText();
  assert.notEqual(second, first);
  await page.click("[aria-label='Earlier version']");
  assert.equal(await page.locator(".message.assistant .body").innerText(), first);
  // Another question in the place of the first.
  await page.locator(".message.user [aria-label='Edit']").click();
  await page.fill(".message.user textarea", "Say something else.");
  await page.locator(".edit-bar .primary").click();
  await page.waitForFunction(() => document.querySelector(".message.user .version")?.textContent === "2 / 2" && !document.querySelector(".running"));
  assert.equal(await page.locator(".message.user .plain-text").innerText(), "Say something else.");
  await page.locator(".message.user [aria-label='Earlier version']").click();
  assert.equal(await page.locator(".message.user .plain-text").innerText(), "Say something.");
  assert.equal(await page.locator(".message.assistant .body").innerText(), first);
  // An answer that a person has changed is what the conversation goes on with.
  await page.locator(".message.assistant [aria-label='Edit']").click();
  await page.fill(".message.assistant textarea", "My name is Olivier");
  await page.locator(".edit-bar .primary").click();
  await page.waitForFunction(() => document.querySelector(".message.assistant .version").textContent === "3 / 3");
  const asked = page.waitForRequest("**/v1/chat/completions");
  await send(page, "Go on.");
  const { messages } = (await asked).postDataJSON();
  assert.deepEqual(messages.map((message) => message.content), ["Say something.", "My name is Olivier", "Go on."]);
  await settled(page, 2);
}

export async function seeds_repeat_answers({ page, server }) {
  await visit(page, server);
  await set(page, { max_tokens: 12, temperature: 1.5 });
  const first = await ask(page, "Say something.");
  await page.locator(".notes button").click();
  await page.click("[aria-label='Retry']");
  await page.waitForFunction(() => document.querySelector(".version")?.textContent === "2 / 2" && !document.querySelector(".running"));
  assert.equal(await page.locator(".message.assistant .body").innerText(), first);
}

export async function tokens_are_coloured_and_lead_elsewhere({ page, server }) {
  await visit(page, server);
  await set(page, { max_tokens: 12, temperature: 0, logprobs: true, top_logprobs: 4 });
  await ask(page, QUESTION);
  await page.click("[aria-label='Show tokens']");
  const { tokens, content } = (await kept(page))[0].messages[1];
  assert.equal(tokens.length, 12);
  assert.equal(tokens.map((token) => token.text).join(""), content);
  assert.equal(await page.locator(".token-text .token").count(), 12);
  const levels = await page.locator(".token-text .token").evaluateAll((spans) => spans.map((span) => Number(/p(\d)/.exec(span.className)[1])));
  const bounds = [0.9, 0.6, 0.35, 0.15, 0.05];
  assert.deepEqual(levels, tokens.map(({ logprob }) => bounds.filter((bound) => Math.exp(logprob) < bound).length));
  await page.locator(".token-text .token").nth(3).click();
  assert.equal(await page.locator(".token-detail > div").count(), 4);
  await shoot(page, "tokens");
  const [other] = tokens[3].top.find(([text]) => text !== tokens[3].text);
  const asked = page.waitForRequest("**/v1/chat/completions");
  await page.locator(".token-detail button").first().click();
  const body = (await asked).postDataJSON();
  const prefix = tokens.slice(0, 3).map((token) => token.text).join("") + other;
  assert.deepEqual([body.messages.at(-1).content, body.continue_final_message], [prefix, true]);
  await page.waitForFunction(() => document.querySelector(".version")?.textContent === "2 / 2" && !document.querySelector(".running"));
  const branch = (await kept(page))[0].messages[2];
  assert.ok(branch.content.startsWith(prefix) && branch.content.length > prefix.length);
}

export async function tools_are_called_and_answered({ page, server }) {
  await visit(page, server);
  const parameters = { type: "object", properties: { city: { type: "string", enum: ["Paris", "Rome"] } }, required: ["city"] };
  const tools = [{ type: "function", function: { name: "get_weather", description: "The weather of a city", parameters } }];
  await set(page, { temperature: 0, max_tokens: 40, tools: JSON.stringify(tools), tool_choice: "get_weather" });
  await ask(page, "How is the weather in Paris?");
  assert.equal(await page.locator(".call code").innerText(), "get_weather");
  const { city } = JSON.parse(await page.locator(".call pre").innerText());
  assert.ok(["Paris", "Rome"].includes(city));
  await shoot(page, "tools");
  await set(page, { tool_choice: "none" });
  await page.fill(".results textarea", "Sunny, 25 degrees");
  const asked = page.waitForRequest("**/v1/chat/completions");
  await page.click(".results .primary");
  const { messages } = (await asked).postDataJSON();
  assert.deepEqual(messages.map((message) => message.role), ["user", "assistant", "tool"]);
  assert.equal(messages[1].tool_calls[0].id, messages[2].tool_call_id);
  assert.equal(messages[2].content, "Sunny, 25 degrees");
  await settled(page, 2);
  assert.equal(await page.locator(".message.assistant .error").count(), 0);
}

export async function thoughts_are_folded({ page, double }) {
  double.answers.thoughts = async (to) => {
    begin(to);
    for (const word of ["Let ", "me ", "think."]) event(to, { content: "", reasoning_content: word, reasoning: word });
    event(to, { content: "Four." });
    end(to, 4);
  };
  await visit(page, double.url);
  await ask(page, "double:thoughts");
  assert.equal(await page.locator(".thoughts").evaluate((node) => node.open), false);
  assert.equal(await page.locator(".thoughts summary").innerText(), "Thoughts");
  await page.click(".thoughts summary");
  assert.equal(await page.locator(".thoughts .markdown").innerText(), "Let me think.");
  assert.equal(await page.locator(".message.assistant .body > .markdown").innerText(), "Four.");
}

export async function answers_stand_side_by_side_also_of_two_servers({ page, server, seeing, key }) {
  await visit(page, server);
  await set(page, { max_tokens: 12, temperature: 1 });
  await page.click("#lanes");
  await page.click("#add-lane");
  await page.fill("#lane-0-temperature", "0");
  await page.fill("#lane-1-temperature", "1.4");
  await page.fill("#lane-1-seed", "5");
  await page.click("#lanes-form .primary");
  await send(page, "Say something.");
  await settled(page, 2);
  const [cold, warm] = await page.locator(".side-by-side .body").allInnerTexts();
  assert.notEqual(cold, warm);
  assert.deepEqual(await page.locator(".side-by-side .who").allInnerTexts(), ["temperature 0\ngoes on", "temperature 1.4"]);
  await page.locator(".side-by-side .message").nth(1).getByText("Go on with this").click();
  const asked = page.waitForRequest("**/v1/chat/completions");
  await send(page, "Why?");
  const body = (await asked).postDataJSON();
  assert.equal(body.messages[1].content, (await kept(page))[0].messages[2].content);
  await settled(page, 4);
  await shoot(page, "side_by_side");
  // Another server, which asks for a key: the page comes again with leave to talk to it.
  await page.click("#lanes");
  await page.fill("#server-url", `${seeing}/v1`);
  await page.click("#add-server");
  assert.match(await page.locator("#server-problem").innerText(), /Nothing behind it/);
  await page.fill("#server-url", seeing);
  await page.click("#add-server");
  await page.waitForURL((url) => url.searchParams.get("server") === seeing);
  await page.waitForSelector("#facts li");
  await set(page, { max_tokens: 6 });
  await send(page, "Hello");
  await page.waitForSelector("#key-dialog[open]");
  assert.equal(await page.locator("#key-server").innerText(), seeing);
  await page.fill("#key", key);
  await page.click("#key-form .primary");
  await page.waitForSelector(".error", { state: "detached" });
  await settled(page, 3);
  assert.deepEqual(await page.locator(".side-by-side .error").allInnerTexts(), []);
  assert.match((await page.locator(".side-by-side .who").allInnerTexts())[2], new RegExp(new URL(seeing).host));
  assert.ok((await page.locator(".side-by-side .body").nth(2).innerText()).length > 0);
}

const PAGE = `# Title

A **bold** and *slanted* word, \`code\`, ~~gone~~, [link](https://example.com/a_(b)) and $E = mc^2$.

1. one
2. two
   - inner
   - [x] done

| a | b |
|---|--:|
| 1 | 2 |

> quoted

\`\`\`python
def add(a, b):  # a comment
    return a + b + len("text")
\`\`\`

$$\\frac{a}{b} = \\sum_{i=1}^{n} x_i$$

---

The end: 2 * 3 * 4 and snake_case_name.`;

export async function markdown_becomes_nodes_as_it_comes({ page, double }) {
  double.answers.page = speaking(PAGE, 5, 2);
  await visit(page, double.url);
  await ask(page, "double:page");
  const found = await page.evaluate(() => {
    const text = (selector) => [...document.querySelectorAll(`.body > .markdown ${selector}`)].map((node) => node.textContent);
    return {
      names: [...document.querySelector(".body > .markdown").children].map((node) => node.localName),
      strong: text("strong"), em: text("em"), del: text("del"), code: text("p code"), items: text("li").length,
      cells: text("td"), keywords: text(".c-keyword"), strings: text(".c-string"), comments: text(".c-comment"), math: text("math").length,
      href: document.querySelector(".markdown a").href, rel: document.querySelector(".markdown a").rel, last: text("p").at(-1),
      checked: document.querySelector(".markdown li input").checked,
    };
  });
  assert.deepEqual(found, {
    names: ["h3", "p", "ol", "div", "blockquote", "figure", "div", "hr", "p"],
    strong: ["bold"], em: ["slanted"], del: ["gone"], code: ["code"], items: 4,
    cells: ["1", "2"], keywords: ["def", "return"], strings: ['"text"'], comments: ["# a comment"], math: 2,
    href: "https://example.com/a_(b)", rel: "noopener noreferrer nofollow", last: "The end: 2 * 3 * 4 and snake_case_name.",
    checked: true,
  });
  await page.click(".copy");
  assert.equal(await page.evaluate(() => navigator.clipboard.readText()), 'def add(a, b):  # a comment\n    return a + b + len("text")');
  await page.locator(".message.assistant [aria-label='Copy']").last().click();
  assert.equal(await page.evaluate(() => navigator.clipboard.readText()), PAGE);
  await shoot(page, "markdown");
}
