// Lets the search work when pages are read from files, where browsers start no workers: the same script in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe"), waiting = [];
      frame.hidden = true;
      document.body.append(frame);
      const inner = frame.contentWindow;
      const tell = data => inner.dispatchEvent(new inner.MessageEvent("message", { data }));
      const load = source => new Promise((done, failed) => {
        const script = inner.document.createElement("script");
        Object.assign(script, { src: source, onload: done, onerror: failed });
        inner.document.body.append(script);
      });
      this.postMessage = data => waiting.push(data);
      inner.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }));
      inner.importScripts = (...sources) => Promise.all(sources.map(load));
      load(new URL(url, location.href).href).then(() => {
        this.postMessage = tell;
        waiting.forEach(tell);
      });
    }
  };
}
