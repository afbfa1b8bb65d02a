// Ends a server, so it comes last.

import assert from "node:assert/strict";
import { ask, kept, send, set, shoot, until, visit } from "./helpers.mjs";

export async function a_server_that_is_gone({ page, context, seeing, key, pid }) {
  await context.addInitScript((key) => sessionStorage.setItem("tgi.key:", key), key);
  await visit(page, seeing);
  await set(page, { max_tokens: 4 });
  await ask(page, "Hello");
  process.kill(pid, "SIGTERM");
  await until(() => fetch(`${seeing}/health`).then(() => false, () => true), "the server to end");
  await send(page, "Are you there?");
  await page.waitForSelector(".error");
  assert.match(await page.locator(".error").innerText(), /No connection\. The server cannot be reached/);
  await page.waitForSelector(".dot.offline");
  assert.equal(await page.locator("#state").innerText(), "no connection");
  await shoot(page, "gone");
  // Nothing is lost, and all that needs no server works.
  assert.deepEqual((await kept(page))[0].messages.map((message) => message.role), ["user", "assistant", "user", "assistant"]);
  await page.click("#new");
  await page.locator(".entry").click();
  assert.equal(await page.locator(".message").count(), 4);
}
