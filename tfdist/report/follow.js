async function follow() {
  const main = document.querySelector("main");
  if (main.dataset.state === "over") return;
  if (!document.hidden) {
    const answer = await fetch(location.href).catch(() => null);
    document.body.classList.toggle("lost", !(answer && answer.ok));
    if (answer && answer.ok) {
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      const open = [...document.querySelectorAll("details")].map((one) => one.open);
      main.replaceWith(page.querySelector("main"));
      document.querySelectorAll("details").forEach((one, i) => { one.open = !!open[i]; });
    }
  }
  setTimeout(follow, 3000);
}
setTimeout(follow, 3000);
