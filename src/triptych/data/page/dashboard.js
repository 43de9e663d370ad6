// The dashboard: what the server does now, asked each second while it is looked at.
import {make} from "./dom.js";
export class Dashboard {
  constructor() { this.element = make("div", {class: "dashboard"}); }
  start() {}
  halt() {}
}
