// Asks the monitor for data. The key of the page's URL goes along as a header.

const key = new URLSearchParams(location.search).get("key");
const headers = key ? { Authorization: `Bearer ${key}` } : {};
const TIMEOUT_MS = 20000;
const MINUTE_MS = 60000;

/** Returns the answer of a path such as "steps.json"; throws an Error that says why there is none. */
export async function ask(path, query = {}) {
  const url = new URL(path, location.href.split(/[?#]/)[0]);
  for (const [name, value] of Object.entries(query)) if (value !== null && value !== undefined) url.searchParams.set(name, value);
  const answer = await fetch(url, { headers, cache: "no-store", credentials: "omit", signal: AbortSignal.timeout(TIMEOUT_MS) });
  if (!answer.ok) throw new Error(`${path}: ${answer.status} ${(await answer.text()).trim()}`);
  return answer.json();
}

const transfers = [];
new PerformanceObserver((list) => {
  for (const entry of list.getEntries()) transfers.push([entry.responseEnd, entry.transferSize]);
}).observe({ type: "resource", buffered: true });

/** Returns the bytes that the page received within the last minute. */
export function receivedBytes() {
  while (transfers.length && transfers[0][0] < performance.now() - MINUTE_MS) transfers.shift();
  performance.clearResourceTimings();
  return transfers.reduce((total, [, size]) => total + size, 0);
}
