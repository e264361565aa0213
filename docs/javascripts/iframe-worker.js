/* The search runs in a worker, but browsers start no worker from a file. If a page is opened from a folder, the
 * worker's script runs in a hidden frame instead, and exchanges the same messages. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = frame.contentWindow;
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = frame.contentDocument.createElement("script");
      script.src = address;
      this.started = new Promise((done) => script.addEventListener("load", () => done(inside)));
      frame.contentDocument.body.append(script);
    }

    postMessage(data) {
      this.started.then((inside) => inside.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
