"""Row-sparse tables: rows that are placed, named, packed and stepped one by one."""
