// Conversations, kept in this browser alone. Where it lends no database they live as long as the page.

let opening = null;
const memory = new Map();

function open() {
  opening ??= new Promise(resolve => {
    let request;
    try { request = indexedDB.open("triptych", 1); } catch { resolve(null); return; }
    request.onupgradeneeded = () => request.result.createObjectStore("talks", {keyPath: "id"});
    request.onsuccess = () => resolve(request.result);
    request.onerror = request.onblocked = () => resolve(null);
  });
  return opening;
}

async function act(mode, work) {
  const database = await open();
  if (!database) return null;
  return new Promise(resolve => {
    const request = work(database.transaction("talks", mode).objectStore("talks"));
    request.onsuccess = () => resolve(request.result ?? null);
    request.onerror = event => { event.preventDefault(); resolve(null); };
  });
}

export async function all() {
  const kept = await act("readonly", talks => talks.getAll()) ?? [];
  return [...kept, ...memory.values()].sort((a, b) => b.updated - a.updated);
}

export async function save(talk) {
  if (await act("readwrite", talks => talks.put(structuredClone(talk))) === null) memory.set(talk.id, talk);
}

export async function remove(id) {
  memory.delete(id);
  await act("readwrite", talks => talks.delete(id));
}
