// As embed.py, by OpenAI's client for JavaScript: node embed.mjs URL KEY TEXT TEXT
import OpenAI, { APIError } from "openai";

const model = "sentence-transformers/all-MiniLM-L6-v2";
const [url, apiKey, ...input] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey, maxRetries: 0 });
const { data } = await client.embeddings.create({ model, input });
let error = null;
try {
  await client.embeddings.create({ model, input: [""] });
} catch (raised) {
  if (!(raised instanceof APIError)) throw raised;
  error = `${raised.constructor.name}: ${raised.message}`;
}
console.log(JSON.stringify({ vectors: data.map(({ embedding }) => embedding), error }));
