// The Vercel AI SDK, by its provider for OpenAI-compatible servers and by OpenAI's own: node vercel.mjs URL MODEL OUT
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateObject, generateText, streamText, tool } from 'ai';
import { writeFileSync } from 'node:fs';
import { z } from 'zod';

const [url, model, out, picture] = process.argv.slice(2);
const compatible = createOpenAICompatible({ name: 'triptych', baseURL: `${url}/v1`, apiKey: 'none', includeUsage: true, supportsStructuredOutputs: true });
const openai = createOpenAI({ baseURL: `${url}/v1`, apiKey: 'none' });
const schema = z.object({ city: z.enum(['Paris', 'Rome']), unit: z.enum(['celsius', 'fahrenheit']) });
const weather = tool({ description: 'The weather.', inputSchema: schema, execute: async ({ city }) => `It rains in ${city}.` });
const assert = (truth, said) => { if (!truth) throw new Error(said); };
const how = { maxRetries: 0, maxOutputTokens: 80 };

const cases = {
  async generates_text() {
    const made = await generateText({ model: compatible(model), prompt: 'Hello', ...how });
    assert(made.text.length > 0, 'no text');
    assert(made.usage.totalTokens > 0, 'no usage');
  },
  async streams_text() {
    const made = streamText({ model: compatible(model), prompt: 'Hello', ...how });
    let text = '';
    for await (const piece of made.textStream) text += piece;
    assert(text.length > 0, 'no text');
    assert((await made.usage).totalTokens > 0, 'no usage');
  },
  async sees_a_picture() {
    const content = [{ type: 'text', text: 'What is this?' }, { type: 'image', image: Buffer.from(picture, 'base64') }];
    const made = await generateText({ model: compatible(model), messages: [{ role: 'user', content }], ...how });
    assert(made.text.length > 0, 'no text');
  },
  async calls_a_tool() {
    const made = await generateText({ model: compatible(model), prompt: 'Weather?', tools: { weather }, toolChoice: 'required', ...how });
    assert(made.toolCalls[0].toolName === 'weather', JSON.stringify(made.toolCalls));
    assert(String(made.toolResults[0].output).startsWith('It rains'), JSON.stringify(made.toolResults));
  },
  async streams_a_tool_call() {
    const made = streamText({ model: compatible(model), prompt: 'Weather?', tools: { weather }, toolChoice: 'required', ...how });
    for await (const piece of made.fullStream) if (piece.type === 'error') throw piece.error;
    assert((await made.toolCalls)[0].toolName === 'weather', 'no call');
  },
  async generates_an_object() {
    const made = await generateObject({ model: compatible(model), prompt: 'Weather in Rome?', schema, ...how });
    assert(['Paris', 'Rome'].includes(made.object.city), JSON.stringify(made.object));
  },
  async speaks_openais_chat() {
    const made = await generateText({ model: openai.chat(model), prompt: 'Hello', ...how });
    assert(made.text.length > 0, 'no text');
  },
  async speaks_openais_responses() {
    const options = { openai: { store: false } };
    const made = await generateText({ model: openai.responses(model), prompt: 'Hello', providerOptions: options, ...how });
    assert(made.text.length > 0, 'no text');
    const stream = streamText({ model: openai.responses(model), prompt: 'Hello', providerOptions: options, ...how });
    let text = '';
    for await (const piece of stream.textStream) text += piece;
    assert(text.length > 0, 'no streamed text');
  },
};

const found = [];
for (const [name, run] of Object.entries(cases)) {
  const started = performance.now();
  let error = null;
  try { await run(); } catch (raised) { error = `${raised.name}: ${String(raised.responseBody ?? raised.cause ?? raised.message).slice(0, 600)}`; }
  found.push({ client: 'vercel', case: name, ok: error === null, seconds: Math.round(performance.now() - started) / 1000, error });
}
writeFileSync(out, JSON.stringify(found));
process.exit(0);
