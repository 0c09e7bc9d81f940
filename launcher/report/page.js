// Reads out the values under the pointer or at a cursor that arrow keys move, sorts tables, smooths and scales curves,
// and shows those of the chosen settings. Without it the page is complete.
'use strict';
const WIDTH = 1000, HEIGHT = 240, STYLES = 8, FEW = 50; // points that are shown as they are
const all = (selector, within = document) => [...within.querySelectorAll(selector)];
const added = (parent, tag, values = {}) => parent.appendChild(Object.assign(document.createElement(tag), values));
const share = (axis, value) => axis.base > 1 ? Math.log(Math.max(value, axis.low) / axis.low) / Math.log(axis.high / axis.low)
  : (value - axis.low) / (axis.high - axis.low);
const tick = value => value && Math.abs(value) < 1e-3 ? value.toExponential()
  : value.toLocaleString('en', {notation: 'compact', maximumSignificantDigits: 4}).replace('K', 'k');

function ticks({low, high, base}) {
  const range = (from, to, step = 1) => Array.from({length: Math.max(0, Math.floor((to - from) / step + 1e-9) + 1)}, (_, k) => from + k * step);
  if (base > 1) {
    const [from, to] = [low, high].map(value => Math.log(value) / Math.log(base));
    const powers = range(Math.ceil(from - 1e-9), to, Math.max(1, Math.ceil((to - from) / 5)));
    if (base === 2) return powers.map(k => [2 ** k, `2<sup>${k}</sup>`]);
    const found = powers.length > 2 ? powers.map(k => 10 ** k)
      : range(Math.floor(from), to).flatMap(k => [1, 2, 5].map(m => m * 10 ** k)).filter(value => value >= low && value <= high);
    if (found.length > 1) return found.map(value => [value, tick(+value.toPrecision(4))]);
  }
  const raw = (high - low) / 5, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map(m => m * power).find(value => value >= raw * .999);
  return range(Math.ceil(low / step - 1e-9) * step, high, step).map(value => [value, tick(+value.toPrecision(12))]);
}

function smoothed(values, weight) { // an exponential average without the bias towards 0 of its start
  let sum = 0, norm = 0;
  return weight ? values.map(value => (sum = weight * sum + (1 - weight) * value) / (norm = weight * norm + 1 - weight)) : values;
}

class Plot {
  constructor(element) {
    this.element = element;
    this.x = {low: +element.dataset.low, high: +element.dataset.high, base: 1};
    const [low, high, base] = (element.dataset.y || '').split(' ').map(Number);
    this.drawn = {low, high, base};
    this.marks = all('.mark', element).map(mark => [mark, parseFloat(mark.style.left) / 100]);
    this.events = all('.event', element);
    element.setAttribute('role', 'slider');
    element.setAttribute('aria-orientation', 'horizontal');
    for (const [name, x] of [['min', this.x.low], ['max', this.x.high], ['now', this.x.high]]) element.setAttribute('aria-value' + name, x);
    element.setAttribute('aria-valuetext', 'arrow keys read the values');
    const move = event => {
      const {left, width} = element.getBoundingClientRect(), {low, high, base} = this.x, part = (event.clientX - left) / width;
      this.show(base > 1 ? low * (high / low) ** part : low + (high - low) * part);
    };
    for (const name of ['pointermove', 'pointerdown']) element.addEventListener(name, move);
    for (const name of ['pointerleave', 'blur']) element.addEventListener(name, () => this.hide());
    element.addEventListener('focus', () => this.show(this.at ?? this.x.high));
    element.addEventListener('keydown', event => this.press(event));
  }

  get series() {
    this.read ||= all('path[data-x]', this.element).map(path => ({path, name: path.dataset.name, y: path.dataset.y.split(' '),
      x: path.dataset.x.split(' ').map(Number), style: path.classList[1]}));
    return this.read.filter(({path}) => path.style.display !== 'none');
  }

  press(event) { // each point of any line is a stop
    const steps = {ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1, PageUp: 10, PageDown: -10, Home: -1e9, End: 1e9}[event.key];
    if (event.key === 'Escape') this.hide();
    if (!steps) return;
    event.preventDefault();
    const stops = [...new Set(this.series.flatMap(({x}) => x))].sort((a, b) => a - b);
    const at = this.at ?? this.x.high, far = steps * (event.shiftKey ? 10 : 1);
    const next = far > 0 ? stops.findIndex(x => x > at) : stops.findLastIndex(x => x < at);
    const place = next < 0 ? (far > 0 ? stops.length - 1 : 0) : next + far - Math.sign(far);
    if (stops.length) this.show(stops[Math.min(stops.length - 1, Math.max(0, place))]);
  }

  show(x) {
    const nearest = xs => {
      let a = 0, b = xs.length - 1;
      while (b - a > 1) { const m = (a + b) >> 1; if (xs[m] < x) a = m; else b = m; }
      return x - xs[a] < xs[b] - x ? a : b;
    };
    const near = this.series.map(series => [series, nearest(series.x)]);
    if (!near.length) return;
    const at = this.at = near.reduce((best, [s, k]) => Math.abs(s.x[k] - x) < Math.abs(best - x) ? s.x[k] : best, Infinity);
    if (!this.tip) {
      [this.cursor, this.tip] = ['cursor', 'tip'].map(className => added(this.element, 'div', {className}));
      for (const part of [this.cursor, this.tip]) part.setAttribute('aria-hidden', 'true'); // the slider's value has the text
    }
    const part = share(this.x, at), percent = 100 * part;
    this.cursor.style.left = percent + '%';
    this.tip.style.left = part < .5 ? `calc(${percent}% + .6rem)` : 'auto';
    this.tip.style.right = part < .5 ? 'auto' : `calc(${100 - percent}% + .6rem)`;
    const close = near.filter(([s, k]) => Math.abs(share(this.x, s.x[k]) - part) <= 1 / 40);
    this.tip.textContent = this.element.dataset.xTitle + ' ' + at.toLocaleString('en') + '\n' +
      close.slice(0, 10).map(([s, k]) => s.name + ': ' + s.y[k]).join('\n') + (close.length > 10 ? '\n...' : '');
    this.element.setAttribute('aria-valuenow', at);
    this.element.setAttribute('aria-valuetext', this.tip.textContent.replaceAll('\n', ', '));
    this.cursor.hidden = this.tip.hidden = false;
  }

  hide() { if (this.tip) this.cursor.hidden = this.tip.hidden = true; }

  draw({weight, base, logarithmicSteps}) {
    const {element, drawn} = this, x = {...this.x, low: +element.dataset.low, base: logarithmicSteps ? 10 : 1}, y = {...drawn, base: base || drawn.base};
    const lines = this.series.map(({path, style, ...of}) => {
      const numbers = of.y.map(Number), values = ['line', 'mean'].includes(style) && numbers.length > FEW ? smoothed(numbers, weight) : numbers;
      return {path, style, points: of.x.map((at, k) => [at, values[k]]).filter(([at, value]) => (x.base === 1 || at > 0) && (y.base === 1 || value > 0))};
    });
    const points = lines.flatMap(line => line.points);
    if (points.length) {
      const least = (k, pick) => points.reduce((found, point) => pick(found, point[k]), points[0][k]);
      const low = least(1, Math.min), high = least(1, Math.max);
      const edge = y.base > 1 ? (high / low) ** .05 : .05 * (high - low) || .05 * Math.max(1, Math.abs(high));
      if (y.base > 1) Object.assign(y, high > low ? {low: low / edge, high: high * edge} : {low: low / y.base, high: high * y.base});
      else Object.assign(y, {low: drawn.low === 0 && low >= 0 ? 0 : low - edge, high: high + edge});
      if (x.base > 1) x.low = Math.min(least(0, Math.min), x.high / 10);
    } else {
      x.base = 1; // without a value the range begins at 0, which has no logarithm
      Object.assign(y, drawn);
    }
    this.x = x;
    const right = value => (WIDTH * share(x, value)).toFixed(1), down = value => (HEIGHT * (1 - share(y, value))).toFixed(1);
    for (const {path, style, points} of lines) {
      const places = points.map(([at, value]) => [right(at), down(value)]);
      path.setAttribute('d', ['dots', 'cross'].includes(style) ? places.map(([a, b]) => `M${a} ${b}h0`).join('')
        : places.map(([a, b], k) => !k ? `M${a} ${b}` : style === 'steps' ? `H${a}V${b}` : `L${a} ${b}`).join(''));
    }
    for (const old of all('.grid, .y, .x', element)) old.remove();
    for (const [kind, axis, side] of [['y', y, 'bottom'], ['x', x, 'left']]) for (const [value, innerHTML] of ticks(axis)) {
      added(element, 'span', {className: kind, innerHTML, ariaHidden: 'true'}).style[side] = 100 * share(axis, value) + '%';
      if (kind === 'y') {
        const line = element.firstChild.insertBefore(document.createElementNS('http://www.w3.org/2000/svg', 'path'), element.firstChild.firstChild);
        line.setAttribute('class', 'grid');
        line.setAttribute('d', `M0 ${down(value)}H${WIDTH}`);
      }
    }
    this.marks.forEach(([mark, part], k) => {
      const place = share(x, +element.dataset.low + part * (x.high - element.dataset.low));
      mark.style.left = 100 * place + '%';
      this.events[k].setAttribute('d', `M${WIDTH * place} 0V${HEIGHT}`);
    });
    this.hide();
  }
}

const plots = new Map(all('.plot[data-low]').map(element => [element, new Plot(element)]));
const curves = all('section').find(each => each.firstElementChild.textContent === 'Curves' && each.querySelector('.plot[data-y]'));
const how = {weight: 0, base: 0, logarithmicSteps: false};
const redraw = () => { if (curves) for (const element of all('.plot[data-y]', curves)) plots.get(element).draw(how); };
if (curves) {
  const bar = document.createElement('p');
  bar.className = 'controls';
  curves.querySelector('h2').after(bar);
  const control = (text, tag, values, change) => {
    const label = added(bar, 'label', {textContent: text + ' '}), input = added(label, tag, values);
    input.addEventListener('input', () => { change(input); redraw(); });
    return input;
  };
  control('smoothing', 'input', {type: 'range', min: 0, max: .99, step: .01, value: 0}, input => how.weight = +input.value);
  const scale = control('values', 'select', {}, input => how.base = +input.value);
  for (const [value, text] of [[0, 'scale of each chart'], [1, 'linear'], [10, 'logarithmic']]) added(scale, 'option', {value, textContent: text});
  control('logarithmic steps', 'input', {type: 'checkbox'}, input => how.logarithmicSteps = input.checked);
}

const table = document.querySelector('table[data-chosen]');
if (table) { // row k is setting k; a chosen one takes the first free colour and keeps it
  const rows = [...table.rows], taken = [];
  const boxes = rows.map(row => {
    const cell = row.insertBefore(document.createElement(row === rows[0] ? 'th' : 'td'), row.firstChild);
    const box = added(cell, 'input', {type: 'checkbox', ariaLabel: row === rows[0] ? 'curves of all' : 'curves of ' + row.cells[1].textContent});
    box.addEventListener('change', () => { for (const each of box === boxes[0] ? boxes : []) each.checked = box.checked; choose(); });
    return box;
  });
  const choose = () => {
    boxes.slice(1).forEach((box, k) => {
      if (!box.checked) delete taken[taken.indexOf(k)];
      else if (!taken.includes(k)) taken[[...taken, undefined].indexOf(undefined)] = k;
    });
    for (const each of all('[data-of]')) {
      const place = taken.indexOf(+each.dataset.of);
      each.style.display = place < 0 ? 'none' : '';
      for (const part of [each, ...all('.s', each)]) for (const name of 'cd') part.style.setProperty('--' + name, `var(--${name === 'c' ? 's' : 'd'}${place % STYLES})`);
    }
    boxes.slice(1).forEach((box, k) => box.style.accentColor = box.checked ? `var(--s${taken.indexOf(k) % STYLES})` : '');
    redraw();
  };
  const best = table.dataset.chosen.split(' ').map(k => +k + 1);
  for (const k of best) boxes[k].checked = true;
  rows[0].after(...best.map(k => rows[k]));
  choose();
}

for (const table of all('table:not(.facts, .confusion)').filter(each => each.rows.length > 3 && !each.closest('.values'))) {
  for (const th of table.rows[0].cells) if (!th.firstElementChild) {
    const button = document.createElement('button');
    button.append(...th.childNodes);
    th.append(button);
    button.addEventListener('click', () => sort(table, th));
  }
}

function sort(table, th) {
  const sign = th.ariaSort === 'ascending' ? -1 : 1, column = th.cellIndex;
  const value = row => { // 1:02:03 counts seconds; what has no number comes last in either direction
    const text = row.cells[column].textContent.replaceAll(',', '');
    return /^\d+(:\d\d)+$/.test(text) ? text.split(':').reduce((sum, part) => 60 * sum + +part, 0) : parseFloat(text);
  };
  const order = (a, b) => {
    const [x, y] = [a, b].map(value), [s, t] = [a, b].map(row => row.cells[column].textContent);
    if (th.className !== 'text' && (x === x || y === y)) return x === x && y === y ? sign * (x - y) : x === x ? -1 : 1;
    return sign * s.localeCompare(t, 'en', {numeric: true});
  };
  for (const each of table.rows[0].cells) each.ariaSort = null;
  th.ariaSort = sign > 0 ? 'ascending' : 'descending';
  table.tBodies[0].append(...[...table.rows].slice(1).sort(order));
}
