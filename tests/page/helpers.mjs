// What scenarios share.

import assert from "node:assert/strict";
import { join } from "node:path";

export const SHOTS = process.env.TGI_TEST_SCREENSHOTS; // a folder, to see what the browser shows

export async function shoot(page, name) {
  if (SHOTS) await page.screenshot({ path: join(SHOTS, `${name}.png`) });
}

export async function visit(page, url, path = "/chat") {
  await page.goto(url + path);
  await page.waitForSelector("#facts li");
}

/** Settings as typed into the panel. */
export async function set(page, values) {
  if (await page.locator("#settings").isHidden()) await page.click("#settings-button");
  await page.waitForFunction(() => document.querySelector("#set-temperature")?.max === "2");
  await page.evaluate(() => document.querySelectorAll("details.group").forEach((group) => (group.open = true)));
  for (const [name, value] of Object.entries(values)) {
    const field = page.locator(`#set-${name}`);
    if (typeof value === "boolean") await field.setChecked(value);
    else if ((await field.evaluate((node) => node.tagName)) === "SELECT") await field.selectOption(value);
    else {
      await field.fill(String(value));
      await field.dispatchEvent("change");
    }
  }
  await page.click("#close-settings");
}

export async function send(page, text) {
  await page.fill("#message", text);
  await page.press("#message", "Enter");
}

export async function settled(page, count) {
  await page.waitForFunction((count) => document.querySelectorAll(".message.assistant").length >= count && !document.querySelector(".message.running"), count, { timeout: 60_000 });
}

/** Sends, waits for the answer, and gives its text as it was received. */
export async function ask(page, text) {
  const before = await page.locator("#thread .message.assistant").count();
  await send(page, text);
  await settled(page, before + 1);
  return page.locator("#thread .message.assistant .body").last().innerText();
}

/** The conversations that the browser keeps. */
export function kept(page) {
  return page.evaluate(
    () =>
      new Promise((resolve) => {
        const open = indexedDB.open("tgi-chat", 1);
        open.onsuccess = () => {
          const all = open.result.transaction("conversations").objectStore("conversations").getAll();
          all.onsuccess = () => resolve(all.result);
        };
      }),
  );
}

export async function until(check, what, ms = 20_000) {
  for (const end = Date.now() + ms; Date.now() < end; await new Promise((resolve) => setTimeout(resolve, 50))) if (await check()) return;
  assert.fail(`waited for ${what}`);
}

export const metric = async (url, name) => Number(new RegExp(`^${name} (.*)$`, "m").exec(await (await fetch(`${url}/metrics`)).text())?.[1] ?? 0);
