// Runs scenarios in one browser, each in a context of its own, and prints a JSON line for each: what went wrong, if it did.
//
//     node run.mjs '{"server": URL, "seeing": URL, "key": KEY, "pid": PID, "chromium": PATH}' [NAME ...]

import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { chromium } from "playwright-core";
import { Double } from "./double.mjs";
import * as answers from "./answers.mjs";
import * as around from "./around.mjs";
import * as safety from "./safety.mjs";
import * as access from "./access.mjs";
import * as dashboard from "./dashboard.mjs";
import * as last from "./last.mjs";

const SCENARIOS = { ...answers, ...around, ...safety, ...access, ...dashboard, ...last };
const FLAGS = "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-component-update --disable-sync --disable-dev-shm-usage";
const EXPECTED = /Failed to load resource|net::ERR_/; // what the network did is what scenarios ask for

const given = JSON.parse(process.argv[2]);
const names = process.argv.length > 3 ? process.argv.slice(3) : Object.keys(SCENARIOS);
const profile = mkdtempSync(join(tmpdir(), "chromium-"));
const browser = await chromium.launch({ executablePath: given.chromium, args: FLAGS.split(" "), env: { ...process.env, HOME: profile } });
const double = await new Double(given.server).start();

for (const name of names) {
  const begun = Date.now();
  const problems = [];
  const context = await browser.newContext({ viewport: { width: 1280, height: 820 }, acceptDownloads: true, permissions: ["clipboard-read", "clipboard-write"], ...(SCENARIOS[name].options ?? {}) });
  context.setDefaultTimeout(20_000);
  const requests = [];
  context.on("page", (page) => {
    page.on("console", (message) => ["error", "warning"].includes(message.type()) && !EXPECTED.test(message.text()) && problems.push(message.text()));
    page.on("pageerror", (error) => problems.push(error.stack));
    page.on("request", (request) => requests.push(request));
    page.on("dialog", (dialog) => problems.push(`dialog: ${dialog.message()}`));
  });
  let error = null;
  try {
    const page = await context.newPage();
    await SCENARIOS[name]({ page, context, browser, double, requests, ...given });
    if (problems.length) error = `the page complained: ${problems.join("\n")}`;
  } catch (failure) {
    error = `${failure.stack}\n${problems.join("\n")}`;
  }
  await context.close();
  console.log(JSON.stringify({ name, error, seconds: (Date.now() - begun) / 1000 }));
}
await browser.close();
double.stop();
rmSync(profile, { recursive: true, force: true });
