// Marks tables and code that are wider than the page: each scrolls in its own box, and fades at the edge where more is.
(() => {
  const BOXES = ".md-typeset__scrollwrap, .md-typeset pre > code";

  const mark = (box) => {
    const rest = box.scrollWidth - box.clientWidth;
    box.classList.toggle("more-right", box.scrollLeft < rest - 2);
    box.classList.toggle("more-left", rest > 2 && box.scrollLeft > 2);
  };

  const watch = () => {
    const sized = new ResizeObserver((entries) => entries.forEach((entry) => mark(entry.target)));
    for (const box of document.querySelectorAll(BOXES)) {
      box.addEventListener("scroll", () => mark(box), { passive: true });
      sized.observe(box);
      mark(box);
    }
  };

  // After the theme has put the tables into their boxes.
  window.addEventListener("load", watch);
})();
