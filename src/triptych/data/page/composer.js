// The message box: words, pictures, and the one button that sends or stops.

import {$, count, dress, icon, iconButton, make, say} from "./dom.js";
import {filesOf, read, shoot, thumbnail, Unreadable} from "./pictures.js";

const DRAFT = "triptych.draft";

export class Composer {
  /* wishes: {send(text, pictures), stop(), complain(words), changed(), editLast(), inspect(picture)} */
  constructor(wishes) {
    this.wishes = wishes;
    this.pictures = [];
    this.isBusy = false;
    this.hasPictures = true;
    this.used = "";
    this.words = $("#words");
    this.words.value = sessionStorage.getItem(DRAFT) ?? "";
    dress($("#attach"), "plus", "Add pictures");
    dress($("#camera"), "camera", "Take a picture");
    this.listen();
    this.update();
  }

  listen() {
    const isTouch = matchMedia("(pointer: coarse)").matches;
    this.words.addEventListener("input", () => this.update());
    this.words.addEventListener("keydown", event => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing && !isTouch) { event.preventDefault(); this.send(); }
      if (event.key === "ArrowUp" && !this.words.value) { event.preventDefault(); this.wishes.editLast(); }
    });
    $("#composer").addEventListener("submit", event => { event.preventDefault(); this.isBusy ? this.wishes.stop() : this.send(); });
    $("#composer").addEventListener("pointerdown", event => { if (event.target.closest("button, textarea, a") === null) { event.preventDefault(); this.words.focus(); } });
    $("#attach").addEventListener("click", () => $("#file").click());
    $("#camera").addEventListener("click", () => shoot(file => this.take([file]), words => this.wishes.complain(words)));
    for (const id of ["#file", "#shot"]) $(id).addEventListener("change", event => { this.take([...event.target.files]); event.target.value = ""; });
    document.addEventListener("paste", event => {
      const files = filesOf(event.clipboardData);
      if (files.length && !document.querySelector("dialog[open]")) { event.preventDefault(); this.take(files); }
    });
    this.listenForDrops();
  }

  listenForDrops() {
    let depth = 0;
    const has = event => event.dataTransfer?.types.includes("Files");
    const light = is => { $("#drop").hidden = !is; };
    addEventListener("dragenter", event => { if (has(event)) { depth++; light(true); } });
    addEventListener("dragleave", event => { if (has(event) && --depth <= 0) { depth = 0; light(false); } });
    addEventListener("dragover", event => { if (has(event)) event.preventDefault(); });
    addEventListener("drop", event => {
      if (!has(event)) return;
      event.preventDefault();
      depth = 0;
      light(false);
      const files = filesOf(event.dataTransfer);
      files.length ? this.take(files) : this.wishes.complain("That is no picture. PNG, JPEG, WebP, GIF, BMP and TIFF can be sent.");
    });
  }

  async take(files) {
    if (!this.hasPictures) { this.wishes.complain("This model reads text alone."); return; }
    for (const file of files) {
      try {
        const picture = await read(file);
        this.pictures.push(picture);
        this.drawPictures();
        say(`${file.name} is attached`);
        this.look(picture);
      } catch (error) {
        if (!(error instanceof Unreadable)) throw error;
        this.wishes.complain(error.message);
      }
    }
    this.words.focus();
  }

  /* What the server would make of it, before it is sent. */
  async look(picture) {
    const found = await this.wishes.inspect(picture);
    if (!found) return;
    picture.tokens = found.kept_tokens;
    picture.refusal = found.error?.message ?? null;
    if (picture.refusal) say(`${picture.name} would be refused: ${picture.refusal}`);
    this.drawPictures();
  }

  drawPictures() {
    $("#pictures").replaceChildren(...this.pictures.map(picture => make("li", {class: `chip${picture.refusal ? " refused" : ""}${picture.isShown ? "" : " new"}`}, thumbnail(picture),
      iconButton("close", `Remove ${picture.name}`, () => { this.pictures = this.pictures.filter(one => one !== picture); this.drawPictures(); this.words.focus(); }, {class: "chip-close", size: 14}))));
    for (const picture of this.pictures) picture.isShown = true;
    $("#pictures").hidden = !this.pictures.length;
    const refused = this.pictures.find(picture => picture.refusal);
    const [what, hint] = (refused?.refusal ?? "").split(/\.? Hint: /);
    $("#refused").replaceChildren(...refused ? [icon("alert", 16), make("span", {}, make("b", {}, `${refused.name}: ${what}.`), hint ? ` ${hint[0].toUpperCase()}${hint.slice(1)}.` : "")] : []);
    $("#refused").hidden = !refused;
    this.update();
  }

  send() {
    const text = this.words.value.trim();
    if (this.isBusy || (!text && !this.pictures.length)) return;
    const pictures = this.pictures;
    this.words.value = "";
    this.pictures = [];
    this.drawPictures();
    this.wishes.send(text, pictures);
  }

  fill(text, pictures = this.pictures) {
    this.words.value = text;
    this.pictures = pictures;
    this.drawPictures();
    this.words.focus();
  }

  set({isBusy = this.isBusy, hasPictures = this.hasPictures, used = this.used}) {
    Object.assign(this, {isBusy, hasPictures, used});
    $("#attach").hidden = $("#camera").hidden = !hasPictures;
    this.update();
  }

  update() {
    const {words} = this;
    words.style.height = "auto";
    words.style.height = `${Math.min(words.scrollHeight, innerHeight * 0.4)}px`;
    sessionStorage.setItem(DRAFT, words.value);
    const tokens = this.pictures.reduce((sum, picture) => sum + (picture.tokens ?? 0), 0);
    $("#cost").textContent = tokens ? `${count(tokens)} picture tokens` : this.used;
    const isEmpty = !words.value.trim() && !this.pictures.length;
    const button = dress($("#send"), this.isBusy ? "stop" : "send", this.isBusy ? "Stop the answer (Esc)" : "Send");
    button.disabled = !this.isBusy && isEmpty;
    button.classList.toggle("busy", this.isBusy);
    this.wishes.changed();
  }
}
