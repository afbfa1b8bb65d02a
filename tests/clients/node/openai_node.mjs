// openai: chat and completions, whole and streamed, the loop that runs tools, and typed answers.
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const [url, question] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "unused", maxRetries: 0 });
const settings = { model: "tgi", temperature: 0 };
const messages = [{ role: "user", content: question }];

const whole = await client.chat.completions.create({ ...settings, messages, max_tokens: 12 });
let streamed = "";
const stream = await client.chat.completions.create({ ...settings, messages, max_tokens: 12, stream: true });
for await (const chunk of stream) streamed += chunk.choices[0].delta.content;
const helper = client.chat.completions.stream({ ...settings, messages, max_tokens: 12 });
const helped = (await helper.finalChatCompletion()).choices[0].message.content;

const cities = [];
const tool = {
  type: "function",
  function: {
    name: "get_weather",
    description: "The weather of a city",
    parse: JSON.parse,
    function: ({ city }) => (cities.push(city), `Sunny in ${city}`),
    parameters: { type: "object", properties: { city: { type: "string", maxLength: 16 } }, required: ["city"] },
  },
};
const runner = client.chat.completions.runTools(
  {
    ...settings,
    messages: [{ role: "user", content: "What is the weather in Paris?" }],
    tools: [tool],
    tool_choice: { type: "function", function: { name: "get_weather" } },
    max_tokens: 60,
  },
  { maxChatCompletions: 2 },
);
await runner.done();

const Person = z.object({ name: z.string().max(12), age: z.number().int().min(0).max(120) });
const typed = await client.chat.completions.parse({
  ...settings,
  messages: [{ role: "user", content: "Anna is 31 years old. Describe her." }],
  response_format: zodResponseFormat(Person, "person"),
  tools: [{ type: "function", function: { ...tool.function, function: undefined, parse: undefined, strict: true } }],
  max_tokens: 60,
});
const completion = await client.completions.create({ ...settings, prompt: "Count: one, two,", max_tokens: 4 });
let error = {};
try {
  await client.chat.completions.create({ ...settings, messages, top_p: 7 });
} catch (caught) {
  error = { name: caught.constructor.name, status: caught.status, param: caught.param };
}
console.log(
  JSON.stringify({
    texts: [whole.choices[0].message.content, streamed, helped],
    cities,
    person: typed.choices[0].message.parsed,
    calls: typed.choices[0].message.tool_calls,
    completion: completion.choices[0].text,
    error,
  }),
);
