// The agent of support/endpoint_clients.py with OpenAI's own package for Node: `node endpoint_client.cjs HOW`.
const OpenAI = require("openai");

const add = {
  type: "function",
  function: {
    name: "add",
    description: "Add a number to the counter.",
    parameters: { type: "object", properties: { n: { type: "integer" } }, required: ["n"] },
    parse: JSON.parse,
    function: ({ n }) => `added ${n}`,
  },
};

async function main(stream) {
  const messages = [
    { role: "system", content: "You move a counter." },
    { role: "user", content: "Bring the counter from 0 to 9." },
  ];
  const client = new OpenAI();
  const runner = client.chat.completions.runTools({ model: "policy", messages, tools: [add], stream });
  await runner.finalContent();
}

main(process.argv[2] === "stream");
