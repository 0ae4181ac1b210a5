from dataclasses import dataclass
from datetime import date, timedelta
from decimal import Decimal
from fractions import Fraction

from agent_environments.tools import reward, tool


@dataclass
class Invoice:
    number: int
    due: date
    total: Decimal


INVOICES = [Invoice(n, date(2026, 1, 1) + timedelta(days=n), Decimal(n) * Decimal("1.19")) for n in range(1, 21)]


@tool
def invoice(number: int) -> Invoice:
    """Look up an invoice."""
    return INVOICES[number - 1]


@tool(terminal=True)
def total(amount: Decimal) -> Decimal:
    """Say the total of an invoice."""
    return amount


@reward
def right(answer, amount):
    return Fraction(1) if answer and Decimal(answer) == amount else Fraction(0)


TASKS = [{"id": f"invoice_{i.number}", "question": f"Total of invoice {i.number}?", "amount": i.total} for i in INVOICES]
