// @huggingface/inference: text generation (which it asks for at /v1/completions, in TGI's words) and chat, whole and streamed;
// a tool and a format.
import { InferenceClient } from "@huggingface/inference";

const [url, question] = process.argv.slice(2);
const endpoint = new InferenceClient("unused").endpoint(url);
const messages = [{ role: "user", content: question }];
const count = {
  inputs: "Count: one, two,",
  parameters: { max_new_tokens: 4, temperature: 0, do_sample: false, return_full_text: false },
  options: { use_cache: false },
};
const schema = {
  type: "object",
  properties: { age: { type: "integer", minimum: 0, maximum: 99 } },
  required: ["age"],
};
const tool = {
  type: "function",
  function: {
    name: "get_weather",
    description: "The weather of a city",
    parameters: { type: "object", properties: { city: { type: "string", maxLength: 16 } }, required: ["city"] },
  },
};

const pieces = [];
for await (const event of endpoint.textGenerationStream(count)) pieces.push(event.choices[0].text);
const chat = { messages, max_tokens: 12, temperature: 0 };
const whole = await endpoint.chatCompletion(chat);
let streamed = "";
for await (const chunk of endpoint.chatCompletionStream(chat)) streamed += chunk.choices[0].delta.content;
const called = await endpoint.chatCompletion({
  messages: [{ role: "user", content: "What is the weather in Paris?" }],
  tools: [tool],
  tool_choice: "required",
  max_tokens: 60,
  temperature: 0,
});
const typed = await endpoint.chatCompletion({
  messages: [{ role: "user", content: "Anna is 31 years old." }],
  response_format: { type: "json_schema", json_schema: { name: "age", schema } },
  max_tokens: 20,
  temperature: 0,
});
console.log(
  JSON.stringify({
    completions: [(await endpoint.textGeneration(count)).generated_text, pieces.join("")],
    texts: [whole.choices[0].message.content, streamed],
    call: called.choices[0].message.tool_calls[0].function,
    age: JSON.parse(typed.choices[0].message.content).age,
  }),
);
