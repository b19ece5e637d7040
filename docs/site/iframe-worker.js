// Search runs in a Worker, which browsers refuse to pages that are opened from the disk. There, a hidden frame takes its
// place: the worker's script runs in it, and messages are events. Pages of a server are not touched.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      this.ready = new Promise(resolve => {
        const start = () => {
          document.body.appendChild(this.frame)
          const inside = this.frame.contentWindow
          inside.postMessage = data => {
            const event = new MessageEvent("message", { data })
            this.dispatchEvent(event)
            if (this.onmessage) this.onmessage(event)
          }
          const script = inside.document.createElement("script")
          script.src = url
          script.onload = () => resolve(inside)
          inside.document.body.appendChild(script)
        }
        if (document.body) start()
        else document.addEventListener("DOMContentLoaded", start)
      })
    }
    postMessage(data) {
      this.ready.then(inside => inside.dispatchEvent(new inside.MessageEvent("message", { data })))
    }
    terminate() {
      this.frame.remove()
    }
  }
}
