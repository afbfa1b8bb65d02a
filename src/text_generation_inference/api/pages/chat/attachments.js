// Pictures and files that go with a message: picked, pasted or dropped.

import { el, icon, iconButton } from "../common/dom.js";

const KEPT_AS_THEY_ARE = ["image/png", "image/jpeg", "image/gif", "image/webp"];
const MAX_TEXT_BYTES = 1_000_000;
const MAX_SIDE = 2048; // pixels of a picture that has to be made smaller

export class Attachments {
  /** `sees`: what `/info` says of pictures, or nothing; `tell` says what could not be taken. */
  constructor(list, tell) {
    Object.assign(this, { list, tell, sees: null, files: [], pictures: [] });
  }

  get isEmpty() {
    return !this.files.length && !this.pictures.length;
  }

  async add(given) {
    for (const file of given) {
      try {
        if (file.type.startsWith("image/")) await this.addPicture(file);
        else await this.addFile(file);
      } catch (error) {
        this.tell(`${file.name || "The file"}: ${error.message}`);
      }
    }
    this.draw();
  }

  async addPicture(file) {
    if (!this.sees) throw new Error("this model does not see pictures.");
    const most = this.sees.max_images_per_request;
    if (this.pictures.length >= most) throw new Error(`the server takes ${most} pictures at most.`);
    const room = this.sees.payload_limit / 2 / Math.min(most, 4);
    const fits = KEPT_AS_THEY_ARE.includes(file.type) && file.size * 1.4 < room;
    this.pictures.push(await dataUrl(fits ? file : await redraw(file)));
  }

  async addFile(file) {
    if (file.size > MAX_TEXT_BYTES) throw new Error("more than 1 MB of text.");
    let text;
    try {
      text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    } catch {
      text = "\0";
    }
    if (text.includes("\0")) throw new Error("not a text.");
    this.files.push({ name: file.name, text });
  }

  /** What there is, once. */
  take() {
    const { files, pictures } = this;
    Object.assign(this, { files: [], pictures: [] });
    this.draw();
    return { ...(files.length ? { files } : {}), ...(pictures.length ? { pictures } : {}) };
  }

  draw() {
    const remove = (from, entry, name) =>
      iconButton("close", `Remove ${name}`, () => {
        from.splice(from.indexOf(entry), 1);
        this.draw();
      });
    this.list.replaceChildren(
      ...this.pictures.map((url, index) => el("li", { class: "picture" }, el("img", { src: url, alt: `Picture ${index + 1}` }), remove(this.pictures, url, `picture ${index + 1}`))),
      ...this.files.map((file) => el("li", {}, icon("file"), el("span", { text: file.name }), remove(this.files, file, file.name))),
    );
    this.list.hidden = this.isEmpty;
    this.list.dispatchEvent(new Event("change", { bubbles: true }));
  }
}

function dataUrl(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error("it could not be read."));
    reader.readAsDataURL(blob);
  });
}

/** A picture in a form that every server reads, and not larger than needed. */
async function redraw(file) {
  let bitmap;
  try {
    bitmap = await createImageBitmap(file);
  } catch {
    throw new Error("not a picture that this browser can read.");
  }
  const scale = Math.min(1, MAX_SIDE / Math.max(bitmap.width, bitmap.height));
  const canvas = el("canvas", { width: Math.round(bitmap.width * scale), height: Math.round(bitmap.height * scale) });
  const context = canvas.getContext("2d");
  context.fillStyle = "white";
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return new Promise((resolve) => canvas.toBlob(resolve, "image/jpeg", 0.9));
}
