// Asks for the page again each second, and takes over the parts that have changed.
"use strict";

const main = document.querySelector("main");
const silent = document.querySelector("#silent");
const source = new WeakMap();  // part of the page → its HTML as it came
let tag = "", seen = new Date();

for (const part of main.children) source.set(part, part.outerHTML);

/// What the reader has opened, and how far scrolled, stays.
function keepView(from, to) {
  const opened = from.querySelectorAll("details"), scrolled = from.querySelectorAll(".scroll");
  to.querySelectorAll("details").forEach((one, i) => { if (opened[i]) one.open = opened[i].open; });
  return () => to.querySelectorAll(".scroll").forEach((one, i) => {
    if (scrolled[i]) one.scrollLeft = scrolled[i].dataset.left;
  });
}

function takeOver(page) {
  const have = new Map([...main.children].map(part => [part.id, part]));
  const parts = [...page.querySelector("main").children];
  const sameParts = parts.map(part => part.id).join() === [...have.keys()].join();
  const next = parts.map(part => {
    const old = have.get(part.id), html = part.outerHTML;
    if (old && source.get(old) === html) return old;
    source.set(part, html);
    if (old) {
      old.querySelectorAll(".scroll").forEach(one => { one.dataset.left = one.scrollLeft; });
      const scroll = keepView(old, part);
      if (sameParts) old.replaceWith(part);
      requestAnimationFrame(scroll);
    }
    return part;
  });
  if (!sameParts) main.replaceChildren(...next);
}

async function look() {
  try {
    if (!document.hidden) {
      const answer = await fetch("/", {cache: "no-cache", signal: AbortSignal.timeout(10000)});
      if (!answer.ok) throw new Error(answer.statusText);
      if (answer.headers.get("ETag") !== tag)
        takeOver(new DOMParser().parseFromString(await answer.text(), "text/html"));
      tag = answer.headers.get("ETag");
      seen = new Date();
      silent.hidden = true;
    }
  } catch {
    silent.textContent = `ptcfs does not answer since ${seen.toLocaleTimeString()}; this is how it was.`;
    silent.hidden = false;
  }
  setTimeout(look, 1000);
}

setTimeout(look, 1000);
