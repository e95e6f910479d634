/* Reading a JSON schema: what kind of field something is, and its value inside a document. Pure functions. */

/** Follow `$ref`; what stands beside the reference (a default, a description) wins. */
export function resolve(schema, schemas) {
  if (!schema.$ref) return schema;
  const { $ref: reference, ...beside } = schema;
  return { ...resolve(schemas[reference.split("/").at(-1)], schemas), ...beside };
}

/**
 * A field as a form sees it: {kind, isOptional, schema, …}. Kinds: object (properties), union (tag, branches), choice (options),
 * number, boolean, text, list (of short texts or numbers), json (anything else).
 */
export function fieldOf(raw, schemas) {
  let schema = resolve(raw, schemas);
  let isOptional = false;
  if (schema.anyOf) {
    const others = schema.anyOf.filter((part) => part.type !== "null");
    isOptional = others.length < schema.anyOf.length;
    if (others.length === 1) schema = { ...resolve(others[0], schemas), ...pick(schema, ["default", "description", "title"]) };
  }
  return { isOptional, schema, ...kindOf(schema, schemas) };
}

function kindOf(schema, schemas) {
  if (schema.oneOf && schema.discriminator) {
    const tag = schema.discriminator.propertyName;
    const branches = Object.fromEntries(Object.entries(schema.discriminator.mapping).map(([name, reference]) => [name, { $ref: reference }]));
    return { kind: "union", tag, branches };
  }
  if (schema.const !== undefined) return { kind: "choice", options: [schema.const] };
  if (schema.enum) return { kind: "choice", options: schema.enum };
  if (schema.type === "object" && schema.properties) return { kind: "object", properties: schema.properties };
  if (schema.type === "number" || schema.type === "integer") return { kind: "number" };
  if (schema.type === "boolean") return { kind: "boolean" };
  if (schema.type === "string") return { kind: "text" };
  if (schema.type === "array" && ["string", "number", "integer"].includes(resolve(schema.items ?? {}, schemas).type)) {
    return { kind: "list", isNumeric: resolve(schema.items, schemas).type !== "string" };
  }
  return { kind: "json" };
}

function pick(source, names) {
  return Object.fromEntries(names.filter((name) => name in source).map((name) => [name, source[name]]));
}

/** The value at a path of keys; undefined where there is none. */
export function valueAt(document, path) {
  return path.reduce((value, key) => (value !== null && typeof value === "object" ? value[key] : undefined), document);
}

/** Set a value, making objects on the way; undefined removes it, and objects left empty by that. */
export function setAt(document, path, value) {
  if (path.length === 0) return;
  const parents = [document];
  for (const key of path.slice(0, -1)) {
    const parent = parents.at(-1);
    if (parent[key] === null || typeof parent[key] !== "object") {
      if (value === undefined) return;
      parent[key] = {};
    }
    parents.push(parent[key]);
  }
  if (value !== undefined) parents.at(-1)[path.at(-1)] = value;
  else {
    delete parents.at(-1)[path.at(-1)];
    for (let depth = path.length - 2; depth >= 0; depth -= 1) {
      if (Object.keys(parents[depth + 1]).length === 0) delete parents[depth][path[depth]];
    }
  }
}

/** A number as typed: comma or point, exponents; undefined when empty, the text itself when it is no number. */
export function typedNumber(text) {
  const trimmed = text.trim().replace(",", ".");
  if (trimmed === "") return undefined;
  const value = Number(trimmed);
  return Number.isFinite(value) ? value : text;
}

/** What a field's limits are, as words. */
export function limitsOf(schema) {
  const parts = [];
  if (schema.minimum !== undefined) parts.push(`at least ${schema.minimum}`);
  if (schema.exclusiveMinimum !== undefined) parts.push(`above ${schema.exclusiveMinimum}`);
  if (schema.maximum !== undefined && schema.maximum < 2 ** 53) parts.push(`at most ${schema.maximum}`);
  if (schema.exclusiveMaximum !== undefined) parts.push(`below ${schema.exclusiveMaximum}`);
  return parts.join(", ");
}
