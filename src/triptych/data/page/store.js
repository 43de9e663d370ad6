// Conversations, kept in this browser alone. Where it lends no database they live as long as the page.

let opening = null;
const memory = new Map();

function open() {
  opening ??= new Promise(resolve => {
    let request;
    try { request = indexedDB.open("triptych", 2); } catch { resolve(null); return; }
    request.onupgradeneeded = () => {
      const names = request.result.objectStoreNames;
      for (const name of ["talks", "heads"]) if (!names.contains(name)) request.result.createObjectStore(name, {keyPath: "id"});
    };
    request.onsuccess = () => resolve(request.result);
    request.onerror = request.onblocked = () => resolve(null);
  });
  return opening;
}

/* What `work` asks for, once all of it is done; null where it could not be. */
async function act(mode, work) {
  const database = await open();
  if (!database) return null;
  return new Promise(resolve => {
    const transaction = database.transaction(["talks", "heads"], mode);
    const request = work(transaction.objectStore("talks"), transaction.objectStore("heads"));
    transaction.oncomplete = () => resolve(request.result ?? null);
    transaction.onerror = transaction.onabort = event => { event.preventDefault(); resolve(null); };
  });
}

const headOf = ({id, title, created, updated}) => ({id, title, created, updated});

/* The latest first, without their messages: pictures are large. */
export async function heads() {
  const kept = await act("readonly", (talks, heads) => heads.getAll()) ?? [];
  return [...kept, ...[...memory.values()].map(headOf)].sort((a, b) => b.updated - a.updated);
}

export async function load(id) {
  return memory.get(id) ?? await act("readonly", talks => talks.get(id));
}

export async function save(talk) {
  const whole = structuredClone(talk);
  if (await act("readwrite", (talks, heads) => { heads.put(headOf(whole)); return talks.put(whole); }) === null) memory.set(talk.id, talk);
}

export async function remove(id) {
  memory.delete(id);
  await act("readwrite", (talks, heads) => { heads.delete(id); return talks.delete(id); });
}
