// One stream of events over fetch: EventSource cannot send an API key. Opens again when it breaks, and tells what it is doing.

const KEY = "tgi.key:";  // of this tab and this server, as on the chat page
const FIRST_WAIT_MS = 500;
const LONGEST_WAIT_MS = 10000;

export const readKey = () => sessionStorage.getItem(KEY) ?? "";
export const keepKey = (key) => sessionStorage.setItem(KEY, key);

export class Stream {
  // told: {event(object), state(name, text)} where name is live, connecting, locked, lost or off.
  constructor(address, told) {
    this.address = address;
    this.told = told;
    this.stopping = null;
    this.wait = FIRST_WAIT_MS;
    this.timer = 0;
  }

  open() {
    if (this.stopping) return;
    this.stopping = new AbortController();
    this.#run(this.stopping.signal);
  }

  close() {
    clearTimeout(this.timer);
    this.stopping?.abort();
    this.stopping = null;
    this.told.state("off", "Not listening");
  }

  async #run(signal) {
    this.told.state("connecting", "Connecting");
    let again = true;
    let why = "The connection ended";
    try {
      const key = readKey();
      const answer = await fetch(this.address, { headers: key ? { authorization: `Bearer ${key}` } : {}, signal, cache: "no-store" });
      if (answer.status === 401) {
        again = false;
        this.told.state("locked", "An API key is needed");
      } else if (!answer.ok) {
        why = answer.status === 429 ? "The dashboard is open too often" : `The server answered ${answer.status}`;
      } else {
        this.wait = FIRST_WAIT_MS;
        await this.#read(answer.body, signal);
      }
    } catch (error) {
      if (signal.aborted) return;
      why = "The server is not reached";
    }
    if (signal.aborted) return;
    this.stopping = null;
    if (again) {
      this.told.state("lost", `${why}; trying again`);
      this.timer = setTimeout(() => this.open(), this.wait);
      this.wait = Math.min(this.wait * 2, LONGEST_WAIT_MS);
    }
  }

  async #read(body, signal) {
    const reader = body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    while (!signal.aborted) {
      const { value, done } = await reader.read();
      if (done) return;
      const pieces = (rest + value).split("\n\n");
      rest = pieces.pop();
      for (const piece of pieces) {
        if (piece.startsWith("data: ")) this.told.event(JSON.parse(piece.slice(6)));
      }
    }
  }
}
