"""Reports: tables, figures, pages and traces, all rendered from records and from what is derived from them."""
