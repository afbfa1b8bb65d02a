// What is around an answer: settings, files, pictures, keys, conversations that are kept.

import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";
import { ask, kept, send, set, settled, shoot, until, visit } from "./helpers.mjs";

export async function every_setting_has_its_meaning_and_reaches_the_server({ page, server }) {
  await visit(page, server);
  await page.click("#settings-button");
  await page.fill("#system", "You are a pirate.");
  await page.dispatchEvent("#system", "change");
  const typed = {
    temperature: 0.5, top_p: 0.9, top_k: 40, min_p: 0.05, typical_p: 0.95, top_n_sigma: 2, seed: 7, max_tokens: 8, min_tokens: 2,
    stop: "END\nFIN", stop_token_ids: "5, 6", ignore_eos: true, include_stop_str_in_output: true, truncate: 200, repetition_penalty: 1.1,
    frequency_penalty: 0.2, presence_penalty: -0.3, logit_bias: '{"11": 2}', logprobs: true, top_logprobs: 3, skip_special_tokens: "false",
    watermark: true, reasoning_effort: "low", chat_template_kwargs: '{"a": 1}', cache_salt: "mine", parallel_tool_calls: "false",
    tools: "[]", tool_choice: "none", guided_regex: "[a-z ]+", response_format: '{"type": "text"}',
  };
  await set(page, typed);
  const document = await (await fetch(`${server}/api-doc/openapi.json`)).json();
  const { properties } = document.components.schemas.ChatRequest;
  const shown = await page.locator("#setting-groups .field").evaluateAll((fields) => fields.map((field) => [field.querySelector("code").textContent, field.querySelector(".meaning").textContent]));
  assert.deepEqual(shown.map(([name]) => name).sort(), Object.keys(typed).sort());
  for (const [name, meaning] of shown) assert.ok(meaning && meaning.startsWith(properties[name].description), `${name}: ${meaning}`);
  const asked = page.waitForRequest("**/v1/chat/completions");
  await send(page, "Hello");
  const { messages, model, stream, stream_options, ...sent } = (await asked).postDataJSON();
  assert.deepEqual(messages, [{ role: "system", content: "You are a pirate." }, { role: "user", content: "Hello" }]);
  assert.deepEqual(sent, {
    temperature: 0.5, top_p: 0.9, top_k: 40, min_p: 0.05, typical_p: 0.95, top_n_sigma: 2, seed: 7, max_tokens: 8, min_tokens: 2,
    stop: ["END", "FIN"], stop_token_ids: [5, 6], ignore_eos: true, include_stop_str_in_output: true, truncate: 200, repetition_penalty: 1.1,
    frequency_penalty: 0.2, presence_penalty: -0.3, logit_bias: { 11: 2 }, logprobs: true, top_logprobs: 3, skip_special_tokens: false,
    watermark: true, reasoning_effort: "low", chat_template_kwargs: { a: 1 }, cache_salt: "mine", parallel_tool_calls: false,
    tools: [], tool_choice: "none", guided_regex: "[a-z ]+", response_format: { type: "text" },
  });
  await settled(page, 1);
  assert.equal(await page.locator(".message.assistant .error").count(), 0, await page.locator(".message.assistant").innerText());
  await shoot(page, "settings");
  // What is wrong is said at the field, and what the server refuses in its own words.
  await set(page, { logit_bias: "{" });
  assert.match(await page.locator("#set-logit_bias-problem").textContent(), /logit_bias is not JSON/);
  await set(page, { logit_bias: "", temperature: 5 });
  assert.notEqual(await page.locator("#set-temperature-problem").textContent(), "");
  await send(page, "Hello");
  await page.waitForSelector(".error");
  assert.match(await page.locator(".error").innerText(), /Refused\. \(400\).*`temperature` must be >= 0 and <= 2/);
  await page.click("#settings-button");
  await page.click("#reset");
  assert.equal(await page.locator("#settings-count").innerText(), "");
}

export async function files_go_along_as_text({ page, server }) {
  await visit(page, server);
  await set(page, { max_tokens: 4 });
  await page.setInputFiles("#picker", [
    { name: "notes.txt", mimeType: "text/plain", buffer: Buffer.from("Secret: 42\n```\n") },
    { name: "blob.bin", mimeType: "application/octet-stream", buffer: Buffer.from([0, 255, 254]) },
    { name: "dot.png", mimeType: "image/png", buffer: Buffer.from("x") },
  ]);
  await until(async () => (await page.locator("#attachments li").count()) === 1, "the file");
  assert.match(await page.locator("#toast").innerText(), /dot.png: this model does not see pictures/);
  const asked = page.waitForRequest("**/v1/chat/completions");
  await send(page, "What is the secret?");
  assert.equal((await asked).postDataJSON().messages[0].content, "notes.txt:\n````\nSecret: 42\n```\n````\n\nWhat is the secret?");
  await settled(page, 1);
  assert.equal(await page.locator(".file summary").innerText(), "notes.txt");
  assert.equal(await page.locator("#attachments li").count(), 0);
}

// A red square on white.
const PNG = "iVBORw0KGgoAAAANSUhEUgAAAEAAAABAAQMAAACQp+OdAAAABlBMVEX////IHigrioOjAAAAHklEQVR42mNgGFyAkYHhPwMDAyMDE0xklIHMGGwAAPa7AUAn7aGOAAAAAElFTkSuQmCC";

export async function pictures_are_picked_pasted_and_dropped_behind_a_key({ page, seeing, key }) {
  await visit(page, seeing);
  assert.match(await page.locator("#facts").innerText(), /sees pictures/);
  await page.setInputFiles("#picker", [{ name: "a.png", mimeType: "image/png", buffer: Buffer.from(PNG, "base64") }]);
  await until(async () => (await page.locator("#attachments img").count()) === 1, "the picked one");
  for (const [kind, target] of [["paste", "#message"], ["drop", "body"]]) {
    await page.evaluate(
      ([kind, target, data]) => {
        const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
        const transfer = new DataTransfer();
        transfer.items.add(new File([bytes], `${kind}.png`, { type: "image/png" }));
        const given = { bubbles: true, cancelable: true };
        const event = kind === "paste" ? new ClipboardEvent("paste", { ...given, clipboardData: transfer }) : new DragEvent("drop", { ...given, dataTransfer: transfer });
        document.querySelector(target).dispatchEvent(event);
      },
      [kind, target, PNG],
    );
    await until(async () => (await page.locator("#attachments img").count()) === (kind === "paste" ? 2 : 3), kind);
  }
  await page.click("[aria-label='Remove picture 3']");
  await set(page, { max_tokens: 5, temperature: 0 });
  await send(page, "What is this?");
  // The key: asked for, wrong, right, and in this tab alone.
  await page.waitForSelector("#key-dialog[open]");
  await page.fill("#key", "wrong");
  await page.click("#key-form .primary");
  await page.waitForSelector(".message.assistant.running", { state: "detached" });
  await page.waitForSelector("#key-dialog[open]");
  assert.match(await page.locator("#key-text").innerText(), /Incorrect or missing API key/);
  await page.fill("#key", key);
  const asked = page.waitForRequest("**/v1/chat/completions");
  await page.click("#key-form .primary");
  const request = await asked;
  assert.equal(request.headers().authorization, `Bearer ${key}`);
  const url = `data:image/png;base64,${PNG}`;
  assert.deepEqual(request.postDataJSON().messages[0].content, [...[url, url].map((url) => ({ type: "image_url", image_url: { url } })), { type: "text", text: "What is this?" }]);
  await settled(page, 1);
  assert.equal(await page.locator(".error").count(), 0);
  assert.equal(await page.locator(".message.user img").count(), 2);
  assert.match(await page.locator(".message.assistant .notes").innerText(), /5 tokens/);
  const stores = await page.evaluate(() => [JSON.stringify({ ...localStorage }), JSON.stringify({ ...sessionStorage }), location.href]);
  assert.deepEqual(stores.map((text) => text.includes("the-key")), [false, true, false]);
}

export async function conversations_are_kept_found_and_carried({ page, browser, server }) {
  await visit(page, server);
  await set(page, { max_tokens: 6, temperature: 0 });
  await ask(page, "Tell me about zebras.");
  await page.click("#new");
  await ask(page, "What is a quasar?");
  await page.fill("#title", "Stars");
  await page.dispatchEvent("#title", "change");
  await page.reload();
  await until(async () => (await page.locator("#conversations li").count()) === 2, "both");
  await page.fill("#search", "zebras tell");
  assert.deepEqual(await page.locator("#conversations .entry span").allInnerTexts(), ["Tell me about zebras."]);
  await page.fill("#search", "nothing like it");
  assert.equal(await page.locator("#none-found").innerText(), "Nothing found.");
  await page.fill("#search", "");
  await page.locator(".entry", { hasText: "Stars" }).click();
  assert.equal(await page.locator(".message.user .plain-text").innerText(), "What is a quasar?");
  // Out, and into another browser.
  const save = async (button) => {
    await page.click("#more summary");
    const [download] = await Promise.all([page.waitForEvent("download"), page.click(button)]);
    return [download.suggestedFilename(), await readFile(await download.path(), "utf8")];
  };
  const [markdownName, markdown] = await save("#export-markdown");
  assert.equal(markdownName, "Stars.md");
  assert.ok(markdown.startsWith("# Stars\n\n## You\n\nWhat is a quasar?\n\n## embedded\n\n"), markdown);
  const [name, text] = await save("#export-all");
  assert.equal(name, "conversations.json");
  const other = await (await browser.newContext()).newPage();
  await visit(other, server);
  const give = (buffer) => other.setInputFiles("#import-file", [{ name: "given.json", mimeType: "application/json", buffer }]);
  await give(Buffer.from("no json"));
  await until(async () => /given.json was not imported: The file is not JSON/.test(await other.locator("#toast").innerText()), "the refusal");
  await give(Buffer.from('{"form": "other"}'));
  await until(async () => /does not hold conversations/.test(await other.locator("#toast").innerText()), "the refusal");
  await give(Buffer.from(text));
  await until(async () => (await other.locator("#conversations li").count()) === 2, "both");
  const plain = (all) => all.map(({ title, settings, messages }) => [title, settings, messages.map(({ role, content, made }) => [role, content, made.tokens])]).sort();
  const noMade = (all) => all.map((one) => ({ ...one, messages: one.messages.map((message) => ({ made: {}, ...message })) }));
  assert.deepEqual(plain(noMade(await kept(other))), plain(noMade(await kept(page))));
  await other.context().close();
  // Away.
  await page.locator("#conversations li", { hasText: "zebras" }).locator(".remove").click();
  await page.click("#confirm-do");
  await until(async () => (await kept(page)).length === 1, "one to be deleted");
  await page.click("#more summary");
  await page.click("#delete-all");
  await page.click("#confirm-dialog [data-close='']");
  assert.equal((await kept(page)).length, 1);
  await page.click("#more summary");
  await page.click("#delete-all");
  await page.click("#confirm-do");
  await until(async () => (await kept(page)).length === 0, "all to be deleted");
  assert.equal(await page.locator("#welcome").isVisible(), true);
}

export async function colours_are_chosen_and_kept({ page, server }) {
  await visit(page, server);
  const paper = () => page.evaluate(() => getComputedStyle(document.body).backgroundColor);
  const light = await paper();
  await page.emulateMedia({ colorScheme: "dark" });
  const dark = await paper();
  assert.notEqual(light, dark);
  await page.click("#theme");
  assert.equal(await paper(), light);
  await page.reload();
  assert.equal(await paper(), light);
  await page.emulateMedia({ colorScheme: "light" });
  await page.click("#theme");
  assert.equal(await paper(), dark);
}

export async function the_root_is_the_page_for_browsers({ page, server }) {
  await visit(page, server, "/");
  await set(page, { max_tokens: 4 });
  assert.ok(await ask(page, "Hello"));
}
