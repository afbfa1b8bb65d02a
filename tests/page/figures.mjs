// What the page weighs and how soon it is there, as a browser sees it; with a file's name, also a picture of it for README.
//
//     node figures.mjs '{"server": URL, "chromium": PATH}' [PICTURE.png]

import { chromium } from "playwright-core";
import { ask, send, set, settled, visit } from "./helpers.mjs";

const FLAGS = "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-component-update --disable-sync --disable-dev-shm-usage";
const ROUNDS = 5;
const NETWORKS = { "this machine": null, "40 ms, 10 Mbit/s": { latency: 40, bits: 10e6 }, "150 ms, 1.6 Mbit/s": { latency: 150, bits: 1.6e6 } };

const { server, chromium: executablePath } = JSON.parse(process.argv[2]);
const browser = await chromium.launch({ executablePath, args: FLAGS.split(" ") });

async function load(network, again) {
  const context = await browser.newContext({ viewport: { width: 1280, height: 820 } });
  const page = await context.newPage();
  const session = await context.newCDPSession(page);
  await session.send("Network.enable");
  const limits = network ? { latency: network.latency, downloadThroughput: network.bits / 8, uploadThroughput: network.bits / 8 } : null;
  if (limits) await session.send("Network.emulateNetworkConditions", { offline: false, ...limits });
  for (let times = again ? 2 : 1; times; times -= 1) {
    await page.goto(`${server}/chat`, { waitUntil: "commit" });
    await page.waitForSelector("#facts li");
  }
  const figures = await page.evaluate(() => {
    const entries = [...performance.getEntriesByType("navigation"), ...performance.getEntriesByType("resource")].filter((entry) => /\/(chat|pages\/.*)$/.test(new URL(entry.name).pathname));
    return {
      paint: performance.getEntriesByName("first-contentful-paint")[0]?.startTime ?? 0,
      usable: performance.now(),
      files: entries.length,
      compressed: entries.reduce((sum, entry) => sum + entry.encodedBodySize, 0),
      plain: entries.reduce((sum, entry) => sum + entry.decodedBodySize, 0),
      transferred: entries.reduce((sum, entry) => sum + entry.transferSize, 0),
    };
  });
  await context.close();
  return figures;
}

const median = (numbers) => numbers.sort((a, b) => a - b)[Math.floor(numbers.length / 2)];
const rows = [];
for (const [name, network] of Object.entries(NETWORKS)) {
  for (const again of [false, true]) {
    const runs = [];
    for (let round = 0; round < ROUNDS; round += 1) runs.push(await load(network, again));
    const of = (key) => median(runs.map((run) => run[key]));
    rows.push({ network: name, again, paint_ms: of("paint"), usable_ms: of("usable"), files: of("files"), compressed: of("compressed"), plain: of("plain"), transferred: of("transferred") });
  }
}

const picture = process.argv[3];
if (picture) {
  const context = await browser.newContext({ viewport: { width: 1180, height: 960 } });
  const page = await context.newPage();
  await visit(page, server);
  await set(page, { temperature: 0, max_tokens: 150, logprobs: true, top_logprobs: 4 });
  await ask(page, "Write a short Python function that reverses a string.");
  await page.click("#lanes");
  await page.click("#add-lane");
  await page.fill("#lane-1-temperature", "0.7");
  await page.fill("#lane-1-seed", "7");
  await page.click("#lanes-form .primary");
  await send(page, "Explain gravity in one sentence.");
  await settled(page, 3);
  await page.locator(".side-by-side [aria-label='Show tokens']").last().click();
  await page.mouse.move(0, 400);
  await page.evaluate(() => document.querySelector("#scroller").scrollTo(0, 1e6));
  await page.screenshot({ path: picture });
  await context.close();
}
await browser.close();
console.log(JSON.stringify(rows));
