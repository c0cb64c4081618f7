#pragma once

namespace megashard {
struct AdamWTable;
struct SquaresTable;
struct SquaresTotal;
}  // namespace megashard

namespace megashard::sim {

// Of kernels_of_module().
void adamw(const AdamWTable& asked);
void squares(const SquaresTable& asked);
void squares_total(const SquaresTotal& asked);

}  // namespace megashard::sim
