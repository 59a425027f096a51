"""The row executor: runs play bodies and rows, and keeps nothing. What must outlive a process is with admission, receipts and sheets."""
