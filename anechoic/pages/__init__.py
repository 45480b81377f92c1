"""What people read: figures, tables, pages and the demo."""
