// The official OpenAI client for JavaScript, driven by lines of JSON: one call in, one outcome out.
// Arguments: the client's index.mjs, and the base URL of the API.

import { createInterface } from 'node:readline';
import { pathToFileURL } from 'node:url';

const [, , module, baseURL] = process.argv;
const { default: OpenAI } = await import(pathToFileURL(module));

const retryHeaders = ['retry-after', 'retry-after-ms', 'x-should-retry'];

async function call({ body, maxRetries }) {
  const attempts = [];
  const seen = async (url, options) => {
    const attempt = { startedMs: performance.now() };
    attempts.push(attempt);
    const response = await fetch(url, options);
    attempt.status = response.status;
    attempt.headers = Object.fromEntries(retryHeaders.map((name) => [name, response.headers.get(name)]));
    attempt.endedMs = performance.now();
    return response;
  };
  const client = new OpenAI({ apiKey: 'none', baseURL, maxRetries, fetch: seen });
  try {
    const answer = await client.chat.completions.create(body);
    if (!body.stream) {
      return { attempts, text: answer.choices[0].message.content, requestId: answer._request_id };
    }
    let text = '';
    for await (const chunk of answer) {
      text += chunk.choices[0]?.delta?.content ?? '';
    }
    return { attempts, text };
  } catch (error) {
    const { status, code, type, message, requestID } = error;
    return { attempts, error: { name: error.constructor.name, status, code, type, message, requestId: requestID } };
  }
}

for await (const line of createInterface({ input: process.stdin })) {
  process.stdout.write(`${JSON.stringify(await call(JSON.parse(line)))}\n`);
}
