// The summaries of search results are fetched from the pages, which browsers refuse for files opened
// from a disk. There, the results are shown without.
if (location.protocol === "file:") DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;
