// Builds and changes elements. Text is always set as text, never as HTML: models and users wrote much of it.

const SVG = "http://www.w3.org/2000/svg";

/** Returns the element with an id. */
export const byId = (id) => document.getElementById(id);

/** Returns a new HTML element; `attributes` may hold `class`, `text`, `on` (listeners) and any attribute. */
export function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** Returns a new SVG element. */
export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

/** Replaces the children of an element. */
export function replace(parent, ...children) {
  parent.replaceChildren(...children.flat().filter(Boolean));
}

/** Sets the text of an element, if it differs: selections and screen readers notice every change. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Shows buttons of which one or several are pressed; `onPick` gets the value of the one that was clicked. */
export function segments(parent, choices, isPressed, onPick) {
  const buttons = choices.map(([value, label]) =>
    el("button", { type: "button", text: label, on: { click: () => { onPick(value); mark(); } } }));
  const mark = () => buttons.forEach((button, i) =>
    button.setAttribute("aria-pressed", String(isPressed(choices[i][0]))));
  replace(parent, buttons);
  mark();
  return mark;
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "text") element.textContent = value;
    else if (name === "on") for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    else if (name === "style") for (const [key, text] of Object.entries(value)) element.style.setProperty(key, text);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}
