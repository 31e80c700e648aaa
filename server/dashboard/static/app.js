// Live charts of runs, text that streams, and forms that are sent once. Pages work without this file.
"use strict";
(() => {
  const REDRAW_MS = 250, RETRY_MS = 2000, HEIGHT = 190;
  const styles = getComputedStyle(document.documentElement);
  const colour = (name) => styles.getPropertyValue(name).trim();
  const digits = (value, count = 3) => value === null || value === undefined ? "–" : Number(value.toPrecision(count)).toString();
  const percent = (value) => value === null || value === undefined ? "–" : (100 * value).toFixed(1) + "%";
  const bytes = (value) => {
    if (!value) return "–";
    for (const unit of ["B", "kB", "MB", "GB"]) {
      if (value < 1000) return (unit === "B" || value >= 100 ? value.toFixed(0) : value.toFixed(1)) + " " + unit;
      value /= 1000;
    }
    return value.toFixed(1) + " TB";
  };
  const duration = (seconds) => {
    if (seconds === null || seconds === undefined) return "–";
    const whole = Math.floor(seconds);
    if (whole < 60) return whole + " s";
    if (whole < 3600) return Math.floor(whole / 60) + " min" + (whole < 600 ? " " + whole % 60 + " s" : "");
    return Math.floor(whole / 3600) + " h " + Math.floor(whole % 3600 / 60) + " min";
  };
  const FINAL = new Set(["succeeded", "failed", "cancelled"]);
  const part = (name) => document.querySelector(`[data-live="${name}"]`);
  const say = (name, text) => { const element = part(name); if (element && element.textContent !== text) element.textContent = text; };

  // One run: its events so far, by step, and the stream that brings more.
  class Run {
    constructor(id, changed) {
      this.id = id; this.changed = changed; this.last = 0; this.steps = 0; this.final = false;
      this.points = new Map();
      this.open();
    }
    open() {
      this.source = new EventSource(`/ui/jobs/${encodeURIComponent(this.id)}/events?after=${this.last}`);
      this.source.addEventListener("progress", (event) => this.take(event, (data) => this.progress(data)));
      this.source.addEventListener("job", (event) => this.take(event, (data) => this.job(data)));
      this.source.onopen = () => { this.lost = false; this.changed(this); };
      this.source.onerror = () => {
        this.lost = !this.final;
        this.changed(this);
        // The browser reconnects by itself unless the answer was an error.
        if (this.source.readyState === EventSource.CLOSED && !this.final) setTimeout(() => this.open(), RETRY_MS);
      };
    }
    take(event, note) {
      const id = Number(event.lastEventId);
      if (id <= this.last) return;
      this.last = id;
      note(JSON.parse(event.data));
      this.changed(this);
    }
    progress(data) {
      this.latest = data;
      if (data.phase === "compiling" || !data.steps) return;
      this.steps = data.steps;
      const point = this.points.get(data.step) || {};
      for (const name of ["loss", "lr"]) if (data[name] !== null && data[name] !== undefined) point[name] = data[name];
      // A device repeats its latest accuracy until the next validation.
      for (const [name, value] of [["accuracy", data.accuracy], ["validation", data.validation_loss]]) {
        if (value !== null && value !== undefined && value !== this[name]) point[name] = this[name] = value;
      }
      this.points.set(data.step, point);
    }
    job(data) {
      this.state = data.state;
      for (const one of (data.result && data.result.evaluations) || []) {
        const point = this.points.get(one.step) || {};
        if (one.split !== "validation") continue;
        point.accuracy = one.correct / one.total;
        point.validation = one.loss;
        this.points.set(one.step, point);
      }
      if (FINAL.has(data.state)) { this.final = true; this.source.close(); }
    }
  }

  function chartOf(box, name, runs) {
    const axis = {
      stroke: colour("--muted"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line"), width: 1 },
      font: "12px system-ui, sans-serif",
    };
    const value = (self, number) => name === "accuracy" ? percent(number) : digits(number, 4);
    const options = {
      width: box.clientWidth, height: HEIGHT,
      scales: { x: { time: false, range: (self, low, high) => [0, Math.max(high ?? 1, 1, ...runs.map((run) => run.steps))] } },
      axes: [{ ...axis }, { ...axis, size: 56, values: (self, marks) => marks.map((mark) => name === "accuracy" ? percent(mark).replace(".0%", "%") : digits(mark, 4)) }],
      series: [{ label: "step" }, ...runs.map((run, index) => ({
        label: (name === "lr" ? "rate" : name) + (runs.length > 1 ? ` ${index + 1}` : ""), stroke: colour(`--line-${index + 1}`), width: 2, value, spanGaps: true,
        points: { show: name === "accuracy" || name === "validation", size: 6 },
      }))],
      cursor: { drag: { x: false, y: false } },
      // Without a pointer, the legend shows the last step.
      hooks: { setLegend: [(self) => { if (self.legend.idx == null && self.data[0].length) self.setLegend({ idx: self.data[0].length - 1 }); }] },
    };
    box.replaceChildren();
    return new uPlot(options, [[]], box);
  }

  function seriesOf(name, runs) {
    const steps = [...new Set(runs.flatMap((run) => [...run.points].filter(([, point]) => point[name] !== undefined).map(([step]) => step)))].sort((a, b) => a - b);
    return [steps, ...runs.map((run) => steps.map((step) => run.points.get(step)?.[name] ?? null))];
  }

  function watch(area) {
    const charts = new Map();
    let timer = null;
    const began = area.dataset.final === "true";
    const redraw = () => {
      timer = null;
      for (const box of area.querySelectorAll("[data-chart]")) {
        const name = box.dataset.chart, data = seriesOf(name, runs);
        if (!data[0].length) continue;
        if (!charts.has(name)) charts.set(name, chartOf(box, name, runs));
        charts.get(name).setData(data);
      }
      if (runs.length === 1) figures(runs[0], began);
    };
    const changed = () => { timer ??= setTimeout(redraw, REDRAW_MS); };
    const runs = area.dataset.runs.split(" ").map((id) => new Run(id, changed));
    addEventListener("resize", () => {
      for (const [name, chart] of charts) chart.setSize({ width: area.querySelector(`[data-chart="${name}"]`).clientWidth, height: HEIGHT });
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      for (const chart of charts.values()) chart.destroy();
      charts.clear();
      changed();
    });
  }

  // What the page of one job shows beside the charts.
  function figures(run, began) {
    const stream = part("stream"), p = run.latest;
    if (run.final && !began) { location.reload(); return; }
    stream.hidden = !run.lost;
    stream.className = "note wait";
    say("stream", run.lost ? "The connection to the server is lost. The page tries again and shows what it missed." : "");
    const state = part("state")?.firstElementChild;
    if (state && run.state && state.textContent !== run.state) { location.reload(); return; }
    if (!p || run.final) return;
    say("phase", p.phase === "training" ? "" : `phase: ${p.phase}`);
    if (p.steps) say("step", `${p.step} / ${p.steps}`);
    say("loss", digits(p.loss));
    say("accuracy", percent(p.accuracy));
    say("validation", digits(p.validation_loss, 4));
    say("best", percent(p.best_accuracy));
    say("lr", digits(p.lr));
    say("rss", bytes(p.rss_bytes));
    say("left", duration(p.seconds_left));
    const why = part("why");
    if (why) why.hidden = !p.why;
    say("why", p.why || "");
  }

  // A prompt that is continued: the text appears as it is generated.
  function playground(form) {
    const output = document.querySelector("[data-output]"), status = document.querySelector("[data-status]");
    const [go, stop] = [form.querySelector("[type=submit]"), form.querySelector("[data-stop]")];
    const rate = document.querySelector("[data-rate]");
    let control = null;
    stop.addEventListener("click", () => control?.abort());
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      control = new AbortController();
      output.textContent = ""; status.textContent = "Generating…";
      go.disabled = true; stop.hidden = false;
      const prompt = form.elements.prompt.value;
      if (rate) rate.hidden = true;
      try {
        const answer = await fetch(form.action, {
          method: "POST", body: new URLSearchParams(new FormData(form)), headers: { Accept: "text/event-stream" }, signal: control.signal,
        });
        if (!answer.ok) throw new Error((await answer.json()).detail);
        status.textContent = await read(answer.body, output);
        if (rate) {
          rate.elements.prompt.value = prompt;
          rate.elements.completion.value = output.textContent;
          rate.hidden = !output.textContent;
        }
      } catch (error) {
        status.textContent = error.name === "AbortError" ? "Stopped." : error.message;
      } finally {
        go.disabled = false; stop.hidden = true;
      }
    });
  }

  async function read(body, output) {
    const lines = body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "", tokens = 0, finish = "";
    for (;;) {
      const { value, done } = await lines.read();
      if (done) return "The text broke off.";
      rest += value;
      const events = rest.split("\n\n");
      rest = events.pop();
      for (const event of events) {
        const data = event.slice("data: ".length);
        if (data === "[DONE]") return `${tokens} tokens; ended by ${finish === "stop" ? "the model" : "the limit of tokens"}.`;
        const { choices, usage, error } = JSON.parse(data);
        if (error) throw new Error(error.message);
        for (const choice of choices) { output.textContent += choice.text; finish = choice.finish_reason; }
        if (usage) tokens = usage.completion_tokens;
      }
    }
  }

  // A note tells about one action: a reload or a bookmark of the page must not repeat it.
  const address = new URL(location.href);
  if (address.searchParams.has("note")) {
    address.searchParams.delete("note");
    history.replaceState(null, "", address);
  }
  for (const area of document.querySelectorAll("[data-runs]")) if (window.uPlot) watch(area);
  for (const form of document.querySelectorAll("[data-try]")) playground(form);
  for (const form of document.querySelectorAll("form[data-once]")) {
    form.addEventListener("submit", () => { for (const button of form.querySelectorAll("[type=submit]")) button.disabled = true; });
    addEventListener("pageshow", () => { for (const button of form.querySelectorAll("[type=submit]")) button.disabled = false; });
  }
})();
