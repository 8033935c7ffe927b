//! Kinds of parameters. The layer that holds a parameter declares its kind by its type.

/// Layers whose weight multiplies vectors of activations, as Burn's visitors spell their types.
const MATRICES: [&str; 5] = [
    "Struct:Linear",
    "Struct:ResidualLinear",
    "Struct:ScaledLinear",
    "Struct:BlockDiagonal",
    "Struct:HeadMaps",
];

/// Kind of a parameter: a matrix decays by custom, others do not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ParamKind {
    /// A weight that multiplies vectors of activations.
    Matrix,
    /// Numbers for each channel or head, of any rank: biases, weights of norms, rates, shares, taps of short
    /// convolutions.
    Vector,
    /// Rows of a table.
    Embedding,
}

impl ParamKind {
    /// The kind of the parameter `name` of a `container`, both as
    /// [`enter_module`](burn::module::ModuleVisitor::enter_module) gives them.
    pub fn of(container: &str, name: &str) -> Self {
        match container {
            "Struct:Embedding" => Self::Embedding,
            container if name == "weight" && MATRICES.contains(&container) => Self::Matrix,
            "Struct:LowRankAdapter" => Self::Matrix,
            _ => Self::Vector,
        }
    }
}
