// Pages opened from disk may not start workers, which the search wants: run the worker's script in a hidden frame instead.
(() => {
  if (location.protocol !== "file:") return;
  class FrameWorker extends EventTarget {
    constructor(url) {
      super();
      this.waiting = [];
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const inside = this.frame.contentWindow, page = this.frame.contentDocument;
      inside.importScripts = (...urls) => Promise.all(urls.map((one) => this.load(page, one)));
      // Messages from the script to its page, and from the page to the script.
      inside.postMessage = (data) => this.hear(data);
      this.load(page, url).then(() => {
        const waiting = this.waiting;
        this.waiting = null;
        waiting.forEach((data) => this.tell(data));
      });
    }
    load(page, url) {
      return new Promise((resolve, reject) => {
        const script = page.createElement("script");
        Object.assign(script, { src: new URL(url, document.baseURI).href, onload: resolve, onerror: reject });
        page.body.append(script);
      });
    }
    tell(data) {
      const Event = this.frame.contentWindow.MessageEvent;
      this.frame.contentWindow.dispatchEvent(new Event("message", { data }));
    }
    postMessage(data) {
      if (this.waiting) this.waiting.push(data);
      else this.tell(data);
    }
    hear(data) {
      const event = new MessageEvent("message", { data });
      this.dispatchEvent(event);
      this.onmessage?.(event);
    }
    terminate() { this.frame.remove(); }
  }
  window.Worker = FrameWorker;
})();
