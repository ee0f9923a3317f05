// The clock of a live page: ask the server for what it shows now, and let the reader stop the run.
"use strict";
(() => {
  const { byId } = Panels, over = () => Page.progress() && !Panels.going(Page.progress());
  const gone = () => Page.lost(over() ? "The run has ended, and its server with it: this is the last state. fedscaffold watch shows it again." :
    "The server does not answer: this is the last state it sent.");
  async function asked() {
    try {
      const answer = await fetch("state");
      return answer.ok ? await answer.json() : null;
    } catch (error) {
      return null;
    }
  }
  async function poll() {
    const fresh = await asked();
    if (fresh) {
      Page.lost("");
      Page.show(fresh);
    } else gone();
    setTimeout(poll, fresh && Panels.going(fresh.progress) ? 1000 : 5000);
  }
  byId("stop").addEventListener("click", async () => {
    byId("stop").disabled = true;
    try {
      await fetch("stop", { method: "POST" });
    } catch (error) {
      gone();
    }
  });
  poll();
})();
