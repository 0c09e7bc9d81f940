// Reads out the values under the pointer, or under a cursor that arrow keys move. Without it the page is complete.
'use strict';
for (const plot of document.querySelectorAll('.plot[data-low]')) {
  const low = +plot.dataset.low, high = +plot.dataset.high;
  plot.setAttribute('role', 'slider');
  plot.setAttribute('aria-orientation', 'horizontal');
  for (const [name, x] of [['min', low], ['max', high], ['now', high]]) plot.setAttribute('aria-value' + name, x);
  plot.setAttribute('aria-valuetext', 'arrow keys read the values');
  let series = null, cursor = null, tip = null, at = 0;
  const read = () => series ||= [...plot.querySelectorAll('path[data-x]')].map(path => ({
    name: path.dataset.name, x: path.dataset.x.split(' ').map(Number), y: path.dataset.y.split(' ')}));
  const nearest = (xs, x) => {
    let a = 0, b = xs.length - 1;
    while (b - a > 1) { const m = (a + b) >> 1; if (xs[m] < x) a = m; else b = m; }
    return x - xs[a] < xs[b] - x ? a : b;
  };
  const show = x => {
    at = Math.min(high, Math.max(low, x));
    const near = read().map(s => [s, nearest(s.x, at)]);
    const closest = near.reduce((best, [s, k]) => Math.abs(s.x[k] - at) < Math.abs(best - at) ? s.x[k] : best, Infinity);
    if (!cursor) {
      cursor = plot.appendChild(document.createElement('div')); cursor.className = 'cursor';
      tip = plot.appendChild(document.createElement('div')); tip.className = 'tip';
      for (const part of [cursor, tip]) part.setAttribute('aria-hidden', 'true'); // the slider's value has the text
    }
    const share = (closest - low) / (high - low);
    cursor.style.left = 100 * share + '%';
    tip.style.left = share < .5 ? 'calc(' + 100 * share + '% + .6rem)' : 'auto';
    tip.style.right = share < .5 ? 'auto' : 'calc(' + 100 * (1 - share) + '% + .6rem)';
    const close = near.filter(([s, k]) => Math.abs(s.x[k] - closest) <= (high - low) / 40);
    tip.textContent = plot.dataset.xTitle + ' ' + closest.toLocaleString('en') + '\n' +
      close.slice(0, 10).map(([s, k]) => s.name + ': ' + s.y[k]).join('\n') + (close.length > 10 ? '\n...' : '');
    plot.setAttribute('aria-valuenow', closest);
    plot.setAttribute('aria-valuetext', tip.textContent.replaceAll('\n', ', '));
    cursor.hidden = tip.hidden = false;
  };
  const hide = () => { if (cursor) cursor.hidden = tip.hidden = true; };
  const move = event => { const box = plot.getBoundingClientRect(); show(low + (high - low) * (event.clientX - box.left) / box.width); };
  plot.addEventListener('pointermove', move);
  plot.addEventListener('pointerdown', move);
  plot.addEventListener('pointerleave', hide);
  plot.addEventListener('blur', hide);
  plot.addEventListener('focus', () => show(at || high));
  plot.addEventListener('keydown', event => {
    const step = (high - low) / (event.shiftKey ? 10 : 100);
    if (event.key === 'ArrowRight' || event.key === 'ArrowUp') show(at + step); else if (event.key === 'ArrowLeft' || event.key === 'ArrowDown') show(at - step);
    else if (event.key === 'Home') show(low); else if (event.key === 'End') show(high);
    else if (event.key === 'Escape') hide(); else return;
    event.preventDefault();
  });
}
