// The server, as this page sees it: one way to ask, one kind of refusal.

const KEY = "triptych.key";

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? localStorage.getItem(KEY) ?? "",
  set(value, {isKept = false} = {}) {
    sessionStorage.removeItem(KEY);
    localStorage.removeItem(KEY);
    if (value) (isKept ? localStorage : sessionStorage).setItem(KEY, value);
  },
};

/* What went wrong, with what to do about it. status 0: nobody answered. */
export class Refusal extends Error {
  constructor({status = 0, message, hint = "", code = "", after = null, id = ""}) {
    super(message);
    Object.assign(this, {status, hint, code, after, id});
  }

  static of(status, body, {after = null, id = ""} = {}) {
    const error = body?.error ?? {};
    const [message, hint] = (error.message ?? `the server answered ${status}`).split(/\.? Hint: /);
    return new Refusal({status, message, hint: hint ?? "", code: error.code ?? "", after, id});
  }

  plain() { return {status: this.status, message: this.message, hint: this.hint, code: this.code, after: this.after, id: this.id}; }
}

const AWAY = {status: 0, code: "away", message: "The server does not answer", hint: "Is it still running, and can this device reach it?"};

/* Relative paths: the page may live under a prefix of a proxy's. */
export async function ask(path, {body, signal} = {}) {
  const headers = {};
  if (key.get()) headers.authorization = `Bearer ${key.get()}`;
  if (body) headers["content-type"] = "application/json";
  let response;
  try {
    response = await fetch(path, {method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal, cache: "no-store"});
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refusal(AWAY);
  }
  if (response.ok) return response;
  const after = Number(response.headers.get("retry-after")) || null, id = response.headers.get("x-request-id") ?? "";
  throw Refusal.of(response.status, await response.json().catch(() => null), {after, id});
}

export const json = async (path, options) => (await ask(path, options)).json();

/* Like `json`, but null where this server has no such thing. */
export async function maybe(path, options) {
  try {
    return await json(path, options);
  } catch (error) {
    if (error.status === 404 || error.status === 405) return null;
    throw error;
  }
}

/* The records of a stream. Raises Refusal for an error in its midst, and where it ends too soon. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    while (true) {
      let chunk;
      try {
        chunk = await reader.read();
      } catch (error) {
        if (error.name === "AbortError") throw error;
        throw new Refusal({...AWAY, message: "The connection broke in the middle of the answer", hint: "What had arrived is kept. Try again."});
      }
      if (chunk.done) throw new Refusal({...AWAY, message: "The answer ended too soon", hint: "What had arrived is kept. Try again."});
      rest += chunk.value;
      const parts = rest.split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        if (!part.startsWith("data: ")) continue;  // a comment that keeps the stream open
        const data = part.slice(6);
        if (data === "[DONE]") return;
        const record = JSON.parse(data);
        if (record.error) throw Refusal.of(500, record, {id: response.headers.get("x-request-id") ?? ""});
        yield record;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
