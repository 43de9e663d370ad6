// Pictures before they are sent: from files, the clipboard, a drop or the camera.

import {$, bytes, dress, icon, iconButton, make, uid} from "./dom.js";

const SERVED = new Set(["image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp", "image/tiff"]);

export class Unreadable extends Error {}

/* {id, name, url, size, width, height}: url is a data URI. What the server cannot read is redrawn as PNG. */
export async function read(file) {
  const name = file.name || "picture";
  if (file.size === 0) throw new Unreadable(`${name} is empty`);
  const bitmap = await bitmapOf(file);
  let blob = file;
  if (!SERVED.has(file.type)) {
    if (!bitmap) throw new Unreadable(`${name} is not a picture that this browser can read. Send PNG, JPEG, WebP, GIF, BMP or TIFF.`);
    blob = await redraw(bitmap);
  }
  const facts = {id: uid(), name, url: await dataUrl(blob), size: blob.size, width: bitmap?.width ?? null, height: bitmap?.height ?? null};
  bitmap?.close();
  return facts;
}

async function bitmapOf(file) {
  try {
    return await createImageBitmap(file);
  } catch {  // SVG, or a kind that only the server reads
    return file.type === "image/svg+xml" ? drawn(file) : null;
  }
}

async function drawn(file) {
  const image = new Image(), url = URL.createObjectURL(file);
  try {
    image.src = url;
    await image.decode();
    const side = Math.max(image.naturalWidth, image.naturalHeight) || 1024;
    return await createImageBitmap(image, {resizeWidth: Math.round(1024 * (image.naturalWidth || side) / side), resizeHeight: Math.round(1024 * (image.naturalHeight || side) / side)});
  } catch {
    return null;
  } finally {
    URL.revokeObjectURL(url);
  }
}

function redraw(bitmap) {
  const canvas = make("canvas", {width: bitmap.width, height: bitmap.height});
  canvas.getContext("2d").drawImage(bitmap, 0, 0);
  return new Promise((resolve, reject) => canvas.toBlob(blob => blob ? resolve(blob) : reject(new Unreadable("The picture is too large to be redrawn")), "image/png"));
}

function dataUrl(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(blob.type ? reader.result : reader.result.replace(/^data:[^;]*/, "data:image/png"));
    reader.onerror = () => reject(new Unreadable("The file could not be read"));
    reader.readAsDataURL(blob);
  });
}

/* Files of a drop or of the clipboard that may be pictures. */
export const filesOf = transfer => [...transfer?.files ?? []].filter(file => file.type.startsWith("image/") || /\.(heic|heif|avif|tiff?|bmp)$/i.test(file.name));

export const sizeOf = picture => [picture.width && `${picture.width} × ${picture.height}`, picture.size && bytes(picture.size)].filter(Boolean).join(" · ");

/* A picture as a button that shows it large. */
export function thumbnail(picture, facts = {}) {
  const image = make("img", {src: picture.url, alt: picture.name, loading: "lazy", decoding: "async", width: picture.width, height: picture.height,
    onerror: () => image.replaceWith(make("span", {class: "no-preview"}, icon("attach", 22), picture.name))});
  return make("button", {type: "button", class: "thumbnail", title: `${picture.name}, ${sizeOf(picture)}`, "aria-label": `Show ${picture.name} large`, onclick: () => enlarge(picture), ...facts}, image);
}

export function enlarge(picture) {
  const box = make("dialog", {class: "lightbox", "aria-label": picture.name, onclick: event => { if (event.target === box) box.close(); }, onclose: () => box.remove()},
    make("img", {src: picture.url, alt: picture.name}),
    make("p", {}, make("span", {}, picture.name), make("span", {class: "faint"}, sizeOf(picture))),
    iconButton("close", "Close", () => box.close(), {class: "lightbox-close"}));
  document.body.append(box);
  box.showModal();
}

/* Take one picture: the phone's own camera, or this device's in a dialog. Calls `take` with a File. */
export function shoot(take, fail) {
  const isHandheld = matchMedia("(pointer: coarse)").matches;
  if (isHandheld || !navigator.mediaDevices?.getUserMedia) { $("#shot").click(); return; }
  viewfinder(take, fail);
}

async function viewfinder(take, fail) {
  let stream = null, facing = "environment";
  const video = make("video", {autoplay: true, playsinline: true, "aria-label": "Camera"});
  const shutter = make("button", {type: "button", class: "shutter", "aria-label": "Take the picture", disabled: true, onclick: snap});
  const box = make("dialog", {class: "camera", "aria-label": "Camera", onclose: () => { halt(); box.remove(); }}, video,
    make("div", {class: "camera-row"}, iconButton("flip", "Other camera", () => { facing = facing === "user" ? "environment" : "user"; start(); }), shutter, iconButton("close", "Close", () => box.close())));
  document.body.append(box);
  box.showModal();
  await start();

  function halt() { stream?.getTracks().forEach(track => track.stop()); }
  async function start() {
    halt();
    try {
      stream = await navigator.mediaDevices.getUserMedia({video: {facingMode: facing, width: {ideal: 1920}, height: {ideal: 1080}}});
      if (!box.isConnected) { halt(); return; }
      video.srcObject = stream;
      await video.play();
      shutter.disabled = false;
    } catch (error) {
      box.close();
      fail(error.name === "NotAllowedError" ? "This page may not use the camera: the browser's settings for the site say so." : "No camera was found.");
    }
  }
  function snap() {
    const canvas = make("canvas", {width: video.videoWidth, height: video.videoHeight});
    canvas.getContext("2d").drawImage(video, 0, 0);
    canvas.toBlob(blob => {
      take(new File([blob], `camera ${new Date().toLocaleTimeString("en", {hour12: false})}.jpg`, {type: "image/jpeg"}));
      box.close();
    }, "image/jpeg", 0.92);
  }
}
