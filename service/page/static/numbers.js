// Sums, means and order of numbers.

export const sum = (values) => values.reduce((all, value) => all + value, 0);

export const mean = (values) => sum(values) / values.length;

// Indices by value, the highest first; equal values stay in their order.
export const orderOf = (values) => values.map((_, index) => index).sort((one, other) => values[other] - values[one]);
