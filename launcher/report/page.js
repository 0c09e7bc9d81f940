// Reads out the values under the pointer, and sorts tables. Without it the page is complete.
'use strict';
const all = (selector, within = document) => [...within.querySelectorAll(selector)];
const added = (parent, tag, values = {}) => parent.appendChild(Object.assign(document.createElement(tag), values));

for (const plot of all('.plot[data-low]')) {
  const low = +plot.dataset.low, high = +plot.dataset.high, place = x => (x - low) / (high - low);
  const lines = all('path[data-x]', plot).map(path => ({name: path.dataset.name, y: path.dataset.y.split(' '), x: path.dataset.x.split(' ').map(Number)}));
  const cursor = added(plot, 'div', {className: 'cursor', hidden: true, ariaHidden: 'true'});
  const tip = added(plot, 'div', {className: 'tip', hidden: true, ariaHidden: 'true'});
  const show = event => {
    const {left, width} = plot.getBoundingClientRect(), at = low + (high - low) * (event.clientX - left) / width;
    const near = lines.map(({name, x, y}) => {
      const k = x.reduce((best, value, k) => Math.abs(value - at) < Math.abs(x[best] - at) ? k : best, 0);
      return {x: x[k], text: name + ': ' + y[k]};
    });
    const x = near.reduce((best, each) => Math.abs(each.x - at) < Math.abs(best - at) ? each.x : best, Infinity);
    const close = near.filter(each => Math.abs(place(each.x) - place(x)) <= 1 / 40), share = place(x), percent = 100 * share;
    tip.textContent = plot.dataset.xTitle + ' ' + x.toLocaleString('en') + '\n' + close.slice(0, 10).map(each => each.text).join('\n');
    cursor.style.left = percent + '%';
    tip.style.left = share < .5 ? `calc(${percent}% + .6rem)` : 'auto';
    tip.style.right = share < .5 ? 'auto' : `calc(${100 - percent}% + .6rem)`;
    cursor.hidden = tip.hidden = false;
  };
  for (const name of ['pointermove', 'pointerdown']) plot.addEventListener(name, show);
  plot.addEventListener('pointerleave', () => { cursor.hidden = tip.hidden = true; });
}

for (const table of all('table:not(.confusion)').filter(each => each.rows.length > 3)) {
  for (const th of table.rows[0].cells) {
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
