// Code in three shades: words of the language, literals, remarks. One rough scanner for all languages.

import {make} from "./dom.js";

const WORDS = new Set(("abstract and as assert async await bool boolean break case catch char class const constexpr continue crate debugger def default defer del delete do double elif else end enum export extends extern false False final finally float fn for foreach from func function global go goto if impl implements import in include inline instanceof int interface is lambda let local long loop match mod module move mut namespace new nil None nonlocal not null nullptr operator or override package pass private protected pub public raise ref return self Self short signed sizeof static str string struct super switch template then this throw throws trait true True try type typedef typeof union unless unsafe unsigned until use using var virtual void volatile when where while with yield select insert update where group order by having join left on values table create SELECT INSERT UPDATE FROM WHERE GROUP ORDER BY HAVING JOIN LEFT ON AS AND OR NOT IN INTO VALUES SET CREATE TABLE DELETE LIMIT DISTINCT UNION echo fi done esac sudo").split(" "));
const HASH = new Set("python py bash sh shell zsh ruby rb yaml yml toml r perl make makefile dockerfile ini conf elixir ex julia console".split(" "));
const DASHES = new Set("sql lua haskell hs ada elm".split(" "));
const PLAIN = new Set("text txt plain markdown md output log".split(" "));
const MOST = 100_000;  // characters; more is shown in one colour

export function paint(text, language) {
  const name = language.toLowerCase();
  if (PLAIN.has(name) || text.length > MOST) return [text];
  const remark = HASH.has(name) || !name ? "#[^\\n]*" : DASHES.has(name) ? "--[^\\n]*" : name === "html" || name === "xml" ? "<!--[\\s\\S]*?(?:-->|$)" : "//[^\\n]*|/\\*[\\s\\S]*?(?:\\*/|$)";
  const scan = new RegExp(`(?<remark>${remark})|(?<literal>"""[\\s\\S]*?(?:"""|$)|'''[\\s\\S]*?(?:'''|$)|"(?:[^"\\\\\\n]|\\\\.)*"?|'(?:[^'\\\\\\n]|\\\\.)*'|\`(?:[^\`\\\\]|\\\\.)*\`?|\\b\\d[\\w.]*)|(?<word>[A-Za-z_]\\w*)`, "g");
  const nodes = [];
  let at = 0;
  for (const match of text.matchAll(scan)) {
    const kind = match.groups.remark != null ? "remark" : match.groups.literal != null ? "literal" : WORDS.has(match[0]) ? "word" : null;
    if (!kind) continue;
    if (match.index > at) nodes.push(text.slice(at, match.index));
    nodes.push(make("span", {class: `t-${kind}`}, match[0]));
    at = match.index + match[0].length;
  }
  nodes.push(text.slice(at));
  return nodes;
}
