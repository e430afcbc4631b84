// Requests to the service, and their errors.

// An error of a request, with the JSON pointer to the field that caused it, or the name of the input. `concernsAll`: the
// next request would have it too. `needsKey`: another key may be accepted.
export class Problem extends Error {
  constructor(message, details = {}) {
    super(message);
    Object.assign(this, { pointer: null, field: null, concernsAll: false, needsKey: false, ...details });
  }
}

// The model in the page's own URL, /debug?model=...; null: the service's default model.
export const MODEL = new URLSearchParams(location.search).get("model");

// The path of GET /info or of the capabilities, for this model.
export function servedPath(path) {
  if (MODEL === null) return path;
  const name = MODEL.split("/").map(encodeURIComponent).join("/");
  return path === "info" ? `models/${name}/info` : `${path}?model=${encodeURIComponent(MODEL)}`;
}

const named = (body) => (MODEL === null ? body : { model: MODEL, ...body });

// Return the JSON, or the bytes, of a route such as "debug/attribute".
export async function ask(path, body, key, signal) {
  const headers = { ...(body && { "Content-Type": "application/json" }), ...(key && { Authorization: `Bearer ${key}` }) };
  let response;
  try {
    response = await fetch(path, { method: body ? "POST" : "GET", headers, signal, body: body && JSON.stringify(named(body)) });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem("The service could not be reached: it is down, or the connection was interrupted", { concernsAll: true });
  }
  if (response.ok && !response.headers.get("Content-Type")?.includes("json")) return response.arrayBuffer();
  const result = await response.json().catch((error) => {
    if (error.name === "AbortError") throw error;
    throw new Problem(`The service returned status ${response.status} with a body that is not JSON`);
  });
  if (!response.ok) {
    // The service's sentence about a missing key asks for a header; the page has a field.
    const detail = response.status === 401 && !key ? "The service needs an API key: enter it above" : result.detail;
    const message = (detail || `The service returned status ${response.status}`).replace(/\.$/, "");
    const needsKey = [401, 403].includes(response.status);
    throw new Problem(message, { pointer: result.pointer, concernsAll: needsKey, needsKey });
  }
  return withNonfinite(result);
}

// The served models; none if they cannot be read, as with a key without their scope.
export async function servedModels(key) {
  try {
    return (await ask("models", null, key)).models;
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    return [];
  }
}

// Restore NaN and infinities. They are null in JSON; `nonfinite` lists the JSON pointers and kinds of the first. In lists
// of numbers all others become NaN.
function withNonfinite(result) {
  const numbers = { nan: NaN, inf: Infinity, "-inf": -Infinity };
  if (result.nonfinite?.length) fillWithNaN(result);
  for (const { pointer, kind } of result.nonfinite ?? []) {
    const steps = pointer.split("/").slice(1);
    const last = steps.pop();
    const parent = steps.reduce((inner, step) => inner?.[step], result);
    if (parent) parent[last] = numbers[kind];
  }
  return result;
}

function fillWithNaN(value) {
  for (const [key, inner] of Object.entries(value ?? {})) {
    if (inner === null && Array.isArray(value)) value[key] = NaN;
    else if (typeof inner === "object") fillWithNaN(inner);
  }
}

// JSON escapes all control characters but these. A terminal takes them for keys: DEL erases the character before it.
const CONTROLS = /[\x7f-\x9f]/g;
const escaped = (control) => `\\u00${control.charCodeAt(0).toString(16)}`;

// Linux takes less as one argument of a command. Longer bodies are the command's input.
const MAX_ARGUMENT_BYTES = 128 * 1024;

export function curl(path, body, hasKey) {
  const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
  const url = new URL(path, document.baseURI);
  url.hash = "";
  const key = hasKey ? " -H 'Authorization: Bearer KEY'" : "";
  const command = `curl ${quoted(url.href)}${key} -H 'Content-Type: application/json' -d`;
  const json = JSON.stringify(named(body)).replace(CONTROLS, escaped);
  const isArgument = new TextEncoder().encode(json).length < MAX_ARGUMENT_BYTES;
  return isArgument ? `${command} ${quoted(json)}` : `${command} @- <<'END'\n${json}\nEND`;
}
