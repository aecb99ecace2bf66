// Chooses light or dark: what the system says, until the reader chooses otherwise.

const STORED = "tether.theme";
const system = matchMedia("(prefers-color-scheme: dark)");
const listeners = [];

/** Returns "light" or "dark". */
export const theme = () => document.documentElement.dataset.theme ?? (system.matches ? "dark" : "light");

/** Returns a color of the style sheet, by the name of its custom property without dashes. */
export const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

/** Calls `listener` whenever the colors have changed. */
export function onTheme(listener) {
  listeners.push(listener);
}

/** Makes a button switch between light and dark. */
export function startTheme(button) {
  const stored = read();
  if (stored === "light" || stored === "dark") document.documentElement.dataset.theme = stored;
  button.addEventListener("click", () => {
    document.documentElement.dataset.theme = theme() === "dark" ? "light" : "dark";
    write(theme());
    announce();
  });
  system.addEventListener("change", announce);
}

function announce() {
  for (const listener of listeners) listener();
}

function read() {
  try {
    return localStorage.getItem(STORED);
  } catch {
    return null; // storage may be forbidden
  }
}

function write(value) {
  try {
    localStorage.setItem(STORED, value);
  } catch {
    // then the choice lasts as long as the page
  }
}
