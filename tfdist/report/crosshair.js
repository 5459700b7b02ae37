// Show the same step or time in all charts with that axis, with the values there.
document.addEventListener("pointerover", (event) => {
  const hit = event.target.closest(".hit");
  const axis = hit && hit.ownerSVGElement.dataset.axis;
  for (const svg of document.querySelectorAll("svg:has(.crosshair)")) {
    let near = null;
    for (const one of axis === svg.dataset.axis ? svg.querySelectorAll(".hit") : []) {
      const far = (other) => Math.abs(other.dataset.at - hit.dataset.at);
      if (!near || far(one) < far(near)) near = one;
    }
    const line = svg.querySelector(".crosshair");
    line.classList.toggle("shown", !!near);
    for (const end of ["x1", "x2"]) line.setAttribute(end, near ? near.dataset.x : 0);
    const readout = svg.parentElement.querySelector(".readout");
    readout.textContent = near ? near.textContent.replaceAll("\n", " \u00b7 ") : "";
  }
});
